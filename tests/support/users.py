"""Another user for a while: root may enter anything, so what is closed must be met as somebody else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def as_user(uid: int, gid: int) -> Iterator[None]:
    """This process acts as `uid` with the group `gid` beside its own. Needs root, as CI has."""
    groups = os.getgroups()
    os.setgroups([gid])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def give(root: Path, uid: int, gid: int) -> None:
    """All of `root` to a user and a group."""
    for path in [root, *root.rglob("*")]:
        os.chown(path, uid, gid)
