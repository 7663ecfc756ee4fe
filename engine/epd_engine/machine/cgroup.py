"""What a Linux control group leaves a process of its memory limit: in a container, the limit of the pod."""

from collections.abc import Iterator
from pathlib import Path


def memory_left(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes until the tightest limit of this process's group and of those around it; None where none is set.

    Cached file pages count as free, since the kernel drops them first. Reads version 2 and version 1
    (https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1/memory.html).
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    left: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left += _left(mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            left += _left(mount / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return min(left, default=None)


def _left(root: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """Of each group from `path` up to the root, which in a container is often the container's own."""
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        try:
            most, used = int((group / limit).read_text()), int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # not there, or "max"
            pass
        else:
            cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield max(0, most - used + cached)
        if group == root:
            return
