"""Going on in the background: what `epd up -d` does."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from .orphans import die_with, outlive_parent

_READY = b"r"


def run_detached(serve: Callable[[Callable[[Path], None]], int]) -> int:
    """Runs `serve` in a child process and returns when it is ready, or has ended: the exit status.

    The child shares the terminal until it calls the function it is given, which sends its further
    output to a file. Signals that come before go to the child, whose cleaning up is waited for.
    """
    read_end, write_end = os.pipe()
    # Until it is ready the child has no life of its own, even if this process is killed.
    tie = die_with(os.getpid(), signal.SIGTERM)
    child = os.fork()
    if child == 0:
        tie()
        os.close(read_end)
        os._exit(_serve_as_daemon(serve, write_end))
    os.close(write_end)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    if os.read(read_end, 1) == _READY:
        return 0
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _serve_as_daemon(serve: Callable[[Callable[[Path], None]], int], write_end: int) -> int:
    os.setsid()

    def on_ready(log: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for path, flags, descriptors in (
            (os.devnull, os.O_RDONLY, (0,)),
            (str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, (1, 2)),
        ):
            opened = os.open(path, flags, 0o600)
            for descriptor in descriptors:
                os.dup2(opened, descriptor)
            os.close(opened)
        outlive_parent()
        os.write(write_end, _READY)
        os.close(write_end)

    try:
        status = serve(on_ready)
        sys.stdout.flush()
        return status
    except BaseException:  # noqa: BLE001 - a forked child must not return into its parent's stack
        sys.excepthook(*sys.exc_info())
        return 1
