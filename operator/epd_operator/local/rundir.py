"""A deployment's run directory: its lock, its files, and cleaning up after a run that was killed."""

import fcntl
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from .errors import LocalError
from .memory import memory_directory, remove_memory
from .orphans import kill_marked

# A look at the lock by `epd ps` holds it for an instant; that is no second `epd up`.
_CLAIM_ATTEMPTS = 20
_CLAIM_PAUSE_S = 0.02


class AlreadyRunning(LocalError):
    """Another `epd up` holds the run directory."""


def runs_home() -> Path:
    """Where all run directories lie. On disk and not in $XDG_RUNTIME_DIR: a store may be large."""
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state_home).absolute() / "epd"


def known_runs() -> list[str]:
    """Names of the deployments that have a run directory, alive or not."""
    home = runs_home()
    return sorted(entry.name for entry in home.iterdir() if entry.is_dir()) if home.is_dir() else []


class RunDirectory:
    """The directory of one deployment, held by one process at a time.

    The directory is its own lock, so that no lock file is left behind. The kernel lets go of the
    lock when its holder dies in whatever way.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = runs_home() / name
        self._descriptor: int | None = None

    @property
    def state(self) -> Path:
        """The file that says what is running."""
        return self.path / "state.json"

    @property
    def logs(self) -> Path:
        """The directory of log files."""
        return self.path / "logs"

    @property
    def store(self) -> Path:
        """The EC store, where the user named no other."""
        return self.path / "store"

    @property
    def connector(self) -> Path:
        """What vLLM finds our connector in, which is made where it is needed."""
        return self.path / "connector"

    @property
    def memory(self) -> Path:
        """The directory of what the store keeps in memory, which is made where it is needed."""
        return memory_directory(self.path)

    def is_held(self) -> bool:
        """Whether a living `epd up` holds it."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    def claim(self) -> int:
        """Takes the directory, removing what a killed run left: returns how many processes that were.

        Raises AlreadyRunning when another process holds it, LocalError when it cannot be made.
        """
        for _ in range(_CLAIM_ATTEMPTS):
            if self._try_lock():
                break
            time.sleep(_CLAIM_PAUSE_S)
        else:
            raise AlreadyRunning(
                f"{self.name} is running already: see `epd ps`, stop it with `epd down --name {self.name}`"
            )
        killed = kill_marked(self.path)
        remove_memory(self.memory)
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return killed

    def release(self) -> None:
        """Kills what is left of the deployment's processes, and removes the directory."""
        if self._descriptor is None:
            return
        kill_marked(self.path)
        remove_memory(self.memory)
        shutil.rmtree(self.path)
        try:
            self.path.parent.rmdir()
        except OSError:  # other deployments live there
            pass
        os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _try_lock(self) -> bool:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # removed by another process between the two lines
            return False
        except OSError as error:
            raise LocalError(
                f"cannot make the run directory {self.path} ({error.strerror}); "
                "name another place with XDG_STATE_HOME"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before may have removed it: a lock on a removed directory locks nothing.
            if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                self._descriptor, descriptor = descriptor, -1
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return False
