"""Processes that belong to a run directory, found by a mark in their environment.

A supervisor that was killed can tell nobody its children, and a process id alone may by now be
somebody else's. The mark is inherited by grandchildren too.
"""

import ctypes
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

MARK = "EPD_RUN_DIRECTORY"

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, how: signal.Signals) -> Callable[[], None]:
    """For a child to call: the kernel sends it the signal `how` when `parent`, a process id, dies."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, how)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


def outlive_parent() -> None:
    """Undoes `die_with`."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def marked_processes(directory: Path) -> list[int]:
    """Ids of the living processes that carry the mark of a run directory."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _is_marked(entry, directory)]


def kill_marked(directory: Path) -> int:
    """Kills them all, waits until they are gone, and returns how many there were."""
    killed = 0
    while pids := marked_processes(directory):
        killed += sum(_kill(pid, directory) for pid in pids)
    return killed


def _is_marked(pid: int | str, directory: Path) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False
    return f"{MARK}={directory}".encode() in variables


def _kill(pid: int, directory: Path) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # Asked again now that the handle holds on to this very process, whoever had its id before.
        if not _is_marked(pid, directory):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [])
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
