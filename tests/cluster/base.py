"""What every cluster offers, whoever made it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from .command import Unavailable


class Cluster(ABC):
    """A cluster in use. What a kind of cluster cannot do raises `Unavailable`; fixtures make a skip of it."""

    kubeconfig: Path
    """With all rights."""

    @abstractmethod
    def stop(self) -> None:
        """Ends it, and leaves nothing behind. May be called twice."""

    @property
    def node_ip(self) -> str:
        """An address of the node at which this host reaches NodePorts."""
        raise Unavailable("this cluster has no node that is known to be reachable from here")

    @property
    def host_ip(self) -> str:
        """The address at which the cluster reaches servers of this host."""
        raise Unavailable("this cluster is not known to reach this host")

    def load_image(self, oci_archive: Path) -> None:
        """Makes an image known to the node; pods name it with `imagePullPolicy: Never`."""
        raise Unavailable("images cannot be loaded into this cluster")

    def logs(self, component: str, lines: int = 100) -> str:
        """The end of a component's log."""
        raise Unavailable(f"the log of {component} is not at hand in this cluster")

    def stop_apiserver(self, *, force: bool = False) -> None:
        """Ends the API server; its data stays."""
        raise Unavailable("the API server of this cluster is not ours to stop")

    def start_apiserver(self, extra_args: Sequence[str] | None = None) -> None:
        """Starts it again, at the same address; ready when this returns."""
        raise Unavailable("the API server of this cluster is not ours to start")

    def restart_apiserver(self, extra_args: Sequence[str] | None = None, *, force: bool = False) -> None:
        """Ends and starts it. `extra_args` replaces the extra arguments it has; None keeps them."""
        self.stop_apiserver(force=force)
        self.start_apiserver(extra_args)

    def enable_audit(self, level: str = "Metadata") -> Path:
        """Restarts the API server with an audit log: one JSON event a line for every finished request."""
        raise Unavailable("the API server of this cluster keeps no audit log for us")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
