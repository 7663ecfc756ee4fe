"""`python -m tests.cluster up | down | status`: a cluster to work with by hand."""

import argparse
import sys

from .command import ClusterError
from .local import READY, LocalCluster
from .processes import find
from .slots import COMMAND_SLOT, Slot, state_directory


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start a cluster that goes on until `down`; prints its kubeconfig")
    start.add_argument(
        "--control-plane-only", action="store_true", help="no node: objects, but no running pods"
    )
    commands.add_parser("down", help="end it, and remove everything it took")
    commands.add_parser("status", help="whether it runs; exit status 1 if not")
    arguments = parser.parse_args()
    try:
        if arguments.command == "up":
            return up(with_node=not arguments.control_plane_only)
        return down() if arguments.command == "down" else status()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def up(*, with_node: bool) -> int:
    """Starts it, unless it runs."""
    slot = _slot()
    if _runs():
        print(f"already up: export KUBECONFIG={kubeconfig()}")
        slot.release()
        return 0
    LocalCluster.start(with_node=with_node, slot=slot).leave_running()
    print(f"export KUBECONFIG={kubeconfig()}")
    return 0


def down() -> int:
    """Ends it, also one that only half came up."""
    slot = _slot()
    slot.clean()
    slot.release()
    return 0


def status() -> int:
    """Says whether it runs."""
    running = _runs()
    print(f"up: {kubeconfig()}" if running else "down")
    return 0 if running else 1


def kubeconfig() -> str:
    """Of the cluster that `up` starts."""
    return str(state_directory(COMMAND_SLOT) / "pki/admin.kubeconfig")


def _runs() -> bool:
    state = state_directory(COMMAND_SLOT)
    return (state / READY).exists() and bool(find(state))


def _slot() -> Slot:
    slot = Slot.take(COMMAND_SLOT)
    if slot is None:
        raise ClusterError("another `up` or `down` is at work")
    return slot


if __name__ == "__main__":
    sys.exit(main())
