"""What kind of file system a path is on."""

import os
from pathlib import Path

MEMORY_TYPES = frozenset({"tmpfs", "ramfs"})
NETWORK_TYPES = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.glusterfs"})


def filesystem_type(path: Path) -> str:
    """The type of the mount that holds `path` ("tmpfs", "ext4", "nfs4", ...); "" where it cannot be told.

    `path` need not exist: its nearest existing ancestor counts.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:  # "36 35 98:0 /root /mount/point options - type source options"
        fields, _, kind = line.partition(" - ")
        if fields.split(" ")[2] == wanted:
            return kind.split(" ")[0]
    return ""
