"""Who is the janitor: a lease file with a fencing token, for any file system with exclusive creation.

`<root>/.janitor/lease.<token>`; the highest token is the holder's. Its time is renewed while the holder
lives; who finds it too old, or released (`lease.<token>.released`), makes the next one by exclusive creation.
Ages are taken by the file system's own clock, so that nodes need not agree on the time.

A holder that was paused finds out before it deletes anything: by its own clock (which runs on while it is
stopped) its lease has run out, or a higher token lies there. Tokens begin at the time, so that they go on
growing after somebody has removed the directory.
"""

import json
import os
import re
import socket
import time
from pathlib import Path

from epd_engine.ec_store.layout import (
    JANITOR_DIRECTORY,
    make_directory,
    open_new,
    refresh_directory,
    write_all,
)

LEASE_SECONDS = 15.0
_NAME = re.compile(r"lease\.(\d{1,18})(\.released)?")


class LeaseLost(Exception):
    """This process is not the janitor any more, and must delete nothing."""


class LeaseHeld(Exception):
    """Another process is the janitor; the message says who, as far as it is known."""


class StoreLease:
    """This process's claim to be the janitor of the store at `root`."""

    def __init__(self, root: Path, *, seconds: float = LEASE_SECONDS):
        self._root, self._directory, self.seconds = root, root / JANITOR_DIRECTORY, seconds
        self.token: int | None = None
        self._renewed = 0.0

    def acquire(self) -> int:
        """Becomes the janitor, and returns the token. Raises `LeaseHeld` or OSError."""
        make_directory(self._directory)
        highest = self._highest()
        if highest is not None:
            path = self._path(highest)
            try:
                age = self.now() - path.stat().st_mtime
            except FileNotFoundError:
                age = self.seconds + 1  # released
            if age <= self.seconds:
                raise LeaseHeld(f"{_owner(path)} is the janitor of {self._root} (seen {age:.0f} s ago)")
        token, began = max(highest or 0, int(time.time())) + 1, _clock()
        try:
            self._create(token)
        except FileExistsError:
            raise LeaseHeld(f"another janitor of {self._root} started at this moment") from None
        self.token, self._renewed = token, began
        try:
            self.check()
        except LeaseLost as error:
            self._path(token).unlink(missing_ok=True)
            raise LeaseHeld(f"another janitor of {self._root} started at this moment") from error
        self._forget_below(token)
        return token

    def check(self) -> None:
        """Renews the lease when due. Raises `LeaseLost`, and OSError where the volume does not answer."""
        token = self._held()
        highest = self._highest()
        if highest is not None and highest > token:
            self._lose(f"another janitor took over with token {highest}")
        began = _clock()
        if began - self._renewed > self.seconds / 4:
            try:
                os.utime(self._path(token))
            except FileNotFoundError:
                self._lose("the lease file was removed")
            self._renewed = began

    def guard(self) -> None:
        """As `check`, and cheap: for use right before each deletion. Raises `LeaseLost`."""
        self._held()

    def release(self) -> None:
        """Lets the next janitor start at once."""
        if self.token is None:
            return
        path, self.token = self._path(self.token), None
        try:
            os.rename(path, f"{path}.released")
        except OSError:
            return  # it runs out by itself

    def holder(self) -> str | None:
        """Who is the janitor, in words; None where nobody is. Changes nothing."""
        try:
            highest = self._highest()
            if highest is None or not self._path(highest).exists():
                return None
            age = time.time() - self._path(highest).stat().st_mtime
        except OSError:
            return None
        return f"{_owner(self._path(highest))}, token {highest}, seen {max(0.0, age):.0f} s ago"

    def now(self) -> float:
        """The file system's clock, in seconds. Raises OSError."""
        path = self._directory / "clock"
        try:
            os.utime(path)
        except FileNotFoundError:
            os.close(open_new(str(path)))
        return path.stat().st_mtime

    def _held(self) -> int:
        if self.token is None:
            raise LeaseLost("not the janitor")
        # Well before anybody else may find it too old.
        if _clock() - self._renewed > self.seconds * 0.75:
            self._lose("the lease was not renewed in time (was this process paused?)")
        return self.token

    def _lose(self, why: str) -> None:
        self.token = None
        raise LeaseLost(why)

    def _highest(self) -> int | None:
        refresh_directory(self._directory)
        found = [_NAME.fullmatch(name) for name in os.listdir(self._directory)]
        return max((int(match[1]) for match in found if match), default=None)

    def _path(self, token: int) -> Path:
        return self._directory / f"lease.{token}"

    def _create(self, token: int) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
        descriptor = open_new(str(self._path(token)))
        try:
            write_all(descriptor, [json.dumps(owner).encode()])
        finally:
            os.close(descriptor)

    def _forget_below(self, token: int) -> None:
        for name in os.listdir(self._directory):
            match = _NAME.fullmatch(name)
            if match and int(match[1]) < token:
                (self._directory / name).unlink(missing_ok=True)


def _owner(path: Path) -> str:
    try:
        said = json.loads(path.read_text())
        return f"process {said['pid']} on {said['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # runs on while the process, or the machine, sleeps
