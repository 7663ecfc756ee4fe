"""Log files of processes: written with a prefix, bounded in size, read and followed."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

_ROTATE_AT_BYTES = 16 << 20
_FOLLOW_PAUSE_S = 0.1


class LogFile:
    """Takes bytes as a process writes them and keeps whole lines behind a prefix.

    When the file has reached its bound it becomes `<path>.old`, in place of the one before. Lines that
    find no room on the disk are lost: the process must not stand still because nobody reads it.
    """

    def __init__(self, path: Path, prefix: str, rotate_at: int = _ROTATE_AT_BYTES) -> None:
        self.path = path
        self._prefix = prefix.encode() + b" | "
        self._rotate_at = rotate_at
        self._rest = b""
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Adds what was read from the process."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._rotate_at // 4:  # a line without end must not fill memory
            lines, self._rest = [*lines, self._rest], b""
        try:
            self._file.write(b"".join(self._prefix + line.rstrip(b"\r") + b"\n" for line in lines))
            if self._file.tell() >= self._rotate_at:
                self._rotate()
        except OSError:
            pass

    def _rotate(self) -> None:
        self._file.close()
        self.path.rename(self.path.with_name(self.path.name + ".old"))
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Writes a last line that has no end."""
        if self._rest:
            self.write(b"\n")
        self._file.close()


def tail(path: Path, lines: int | None) -> list[str]:
    """The last lines of a file (None: all); none if there is no such file."""
    try:
        with path.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=lines)]
    except FileNotFoundError:
        return []


def follow(paths: Iterable[Path], is_over: Callable[[], bool]) -> Iterator[str]:
    """Lines that are added to any of the files from now on, until `is_over` and all is read."""
    files = {path: _Followed(path) for path in paths}
    over = False
    while not over:
        over = is_over()
        fresh = [line for file in files.values() for line in file.read()]
        yield from fresh
        if not fresh and not over:
            time.sleep(_FOLLOW_PAUSE_S)


class _Followed:
    """The growing end of a file, across its rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()
        self._rest = ""
        if self._file is not None:
            self._file.seek(0, os.SEEK_END)

    def read(self) -> list[str]:
        """Whole lines added since the last call."""
        self._file = self._file or self._open()
        if self._file is None:
            return []
        text = self._rest + self._file.read()
        if self._was_rotated(self._file):
            text += self._file.read()
            self._file.close()
            self._file = None
        *lines, self._rest = text.split("\n")
        return lines

    def _open(self) -> TextIO | None:
        try:
            return self._path.open(errors="replace")
        except FileNotFoundError:
            return None

    def _was_rotated(self, file: TextIO) -> bool:
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False
