"""etcd, API server, controller-manager and scheduler, started in order and made sure of."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from .api import Api, healthy
from .command import POLL_S
from .components import API_SERVER, CONTROLLER_MANAGER, ETCD, SCHEDULER, ControlPlaneSpec
from .processes import Processes

READY_S = 120.0
"""A start takes seconds; a machine under load may need a multiple."""
API_SERVER_GRACE_S = 2.0
"""It takes no new requests at once, but would wait a minute for watches, which never end."""


def until(processes: Processes, component: str, what: str, condition: Callable[[], Any]) -> None:
    """Waits for a condition; a component that ends, or too long a wait, shows the end of the log."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            if condition():
                return
        except OSError:
            # Refused, reset, not authorized yet: all the same as "not yet".
            pass
        processes.check()
        if time.monotonic() > deadline:
            raise processes.failure(component, f"is not {what} after {READY_S:.0f} s")
        time.sleep(POLL_S)


class ControlPlane:
    """The components, wherever `processes` runs them."""

    def __init__(self, spec: ControlPlaneSpec, processes: Processes) -> None:
        self._spec = spec
        self._processes = processes

    def start(self, extra: Sequence[str] = ()) -> None:
        """Everything, ready for use. `extra` are arguments of the API server."""
        listen = self._spec.listen
        self._processes.start(ETCD, self._spec.etcd())
        # The API server retries until etcd is there, so both start up at once.
        self.start_api_server(extra)
        # These two give up on an API server that is not there yet.
        self._processes.start(CONTROLLER_MANAGER, self._spec.controller_manager())
        self._processes.start(SCHEDULER, self._spec.scheduler())
        api = self.api()
        self._until(CONTROLLER_MANAGER, "done with the default service account", _can_make_pods(api))
        if not self._processes.inside:
            # It answers on the loopback interface, which a node's namespace does not share with us.
            self._until(
                SCHEDULER, "healthy", lambda: healthy(f"https://127.0.0.1:{listen.scheduler}/healthz")
            )

    def api(self) -> Api:
        """A client with all rights."""
        return Api(self._spec.pki.kubeconfig("admin"))

    def start_api_server(self, extra: Sequence[str] = ()) -> None:
        """The API server, ready."""
        self._processes.start(API_SERVER, self._spec.api_server(extra))
        api = self.api()
        self._until(API_SERVER, "ready", lambda: api.text("/readyz") == "ok")

    def stop_api_server(self, *, force: bool = False) -> None:
        """Ends the API server alone; etcd keeps the data."""
        self._processes.stop(API_SERVER, grace_s=0 if force else API_SERVER_GRACE_S)

    def _until(self, component: str, what: str, condition: Callable[[], Any]) -> None:
        until(self._processes, component, what, condition)


def _can_make_pods(api: Api) -> Callable[[], Any]:
    """Until the service account has its token, no pod may be made."""
    return lambda: api.json("/api/v1/namespaces/default/serviceaccounts/default").get("secrets")
