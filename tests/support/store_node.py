"""A command as one pod on one node would run it: own user, the volume's group, own view of the mounts.

    python -m tests.support.store_node UID GID [FROM=TO ...] -- COMMAND ...

Run under `unshare --mount`. FROM is a volume that is mounted at TO, and hidden where it was.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def node_command(
    command: Sequence[str], *, uid: int, gid: int, volumes: Mapping[Path, Path] | None = None
) -> list[str]:
    """`command` with mounts of its own; run it with the repository as the working directory."""
    mounts = [f"{here}={there}" for here, there in (volumes or {}).items()]
    head = ["unshare", "--mount", "--propagation", "slave", sys.executable, "-m", __name__]
    return [*head, str(uid), str(gid), *mounts, "--", *command]


def python_path() -> str:
    """PYTHONPATH by which any process finds the tests' own modules."""
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _move_volume(here: Path, there: Path) -> None:
    there.mkdir(parents=True, exist_ok=True)
    _mount("--bind", str(here), str(there))
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(here))


def _open_way_to(path: Path) -> None:
    """Lets any user reach `path`: an interpreter may lie in a directory that is root's alone."""
    closed = next((above for above in reversed(path.parents) if not above.stat().st_mode & 0o001), None)
    if closed is None:
        return
    with tempfile.TemporaryDirectory() as aside:
        _mount("--bind", str(path), aside)
        _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed))
        path.mkdir(parents=True)
        _mount("--bind", aside, str(path))
        subprocess.run(["umount", aside], check=True)


def main(arguments: Sequence[str]) -> None:
    uid, gid = int(arguments[0]), int(arguments[1])
    split = arguments.index("--")
    for mount in arguments[2:split]:
        here, there = mount.split("=")
        _move_volume(Path(here), Path(there))
    command = arguments[split + 1 :]
    for needed in (Path(sys.base_prefix), Path(sys.prefix), REPOSITORY):
        _open_way_to(needed)
    os.umask(0o022)
    os.setgroups([gid])
    os.setgid(uid)
    os.setuid(uid)
    os.chdir("/")
    os.environ["PYTHONPATH"] = python_path()
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
