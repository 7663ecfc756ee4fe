"""Engines' and proxies' /metrics as far as a scaler can see them: what they say is the test's to decide."""

import http.server
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from epd_operator.render.labels import COMPONENT_LABEL, INSTANCE_LABEL, MANAGED_BY, MANAGED_BY_LABEL
from tests.integration.operator.world import World, ready_status

PORT = 8000


class Engine:
    """Answers at an address of this host that is nobody else's."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.body: bytes | None = None
        """What is said instead of the metrics."""
        self.status = 200
        self.asked = 0
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                engine.asked += 1
                lines = "".join(f"{name} {value}\n" for name, value in engine.metrics.items())
                body = lines.encode() if engine.body is None else engine.body
                self.send_response(engine.status if self.path == "/metrics" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = _server(Handler)
        # Whoever asked may be gone: that is no news.
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.address = str(self.server.server_address[0])


def _server(handler: type[http.server.BaseHTTPRequestHandler]) -> http.server.ThreadingHTTPServer:
    """All of 127.0.0.0/8 is this host."""
    while True:
        address = f"127.{random.randint(1, 250)}.{random.randint(1, 250)}.{random.randint(2, 250)}"
        try:
            return http.server.ThreadingHTTPServer((address, PORT), handler)
        except OSError:  # somebody listens at all addresses, or at just this one
            continue


@contextmanager
def engine(**metrics: float) -> Iterator[Engine]:
    """One that answers while inside."""
    made = Engine()
    made.metrics |= metrics
    thread = threading.Thread(target=made.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()


def running_at(engine: Engine) -> dict[str, Any]:
    """What a kubelet says of a ready pod with an address."""
    return {**ready_status(), "podIP": engine.address, "podIPs": [{"ip": engine.address}]}


def make_pod(
    world: World, name: str, role: str, engine: Engine | None, labels: Mapping[str, str] | None = None
) -> None:
    """A pod of the deployment `demo` without a controller; one without an engine has not begun."""
    metadata = {
        "name": name,
        "labels": {
            MANAGED_BY_LABEL: MANAGED_BY,
            INSTANCE_LABEL: "demo",
            COMPONENT_LABEL: role,
            **(labels or {}),
        },
    }
    spec = {"containers": [{"name": "engine", "image": "none"}]}
    world.call("POST", world.path("pods"), {"metadata": metadata, "spec": spec})
    if engine is not None:
        world.pod_status(name, running_at(engine))
