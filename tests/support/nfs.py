"""A loopback NFS export by the kernel's server, where the machine has one."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

FILESYSTEMS = Path("/proc/filesystems")
CONTROL = Path("/proc/fs/nfsd")


class NfsUnavailable(Exception):
    """What this machine lacks, in words."""


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise NfsUnavailable(f"`{' '.join(command)}` does not end") from error
    if done.returncode:
        raise NfsUnavailable(f"`{' '.join(command)}`: {done.stderr.strip() or done.returncode}")


def _probe() -> None:
    for name in ("nfs4", "nfsd"):
        if name not in FILESYSTEMS.read_text().split() and shutil.which("modprobe"):
            subprocess.run(["modprobe", name], capture_output=True, check=False)
        if name not in FILESYSTEMS.read_text().split():
            raise NfsUnavailable(f"the kernel does not know {name}")
    for program in ("exportfs", "rpc.nfsd", "rpc.mountd", "mount.nfs4"):
        if shutil.which(program) is None:
            raise NfsUnavailable(f"{program} is not installed")


@contextmanager
def exported(path: Path) -> Iterator[None]:
    """`path` as an export that this machine may mount. Raises `NfsUnavailable`."""
    _probe()
    with ExitStack() as stack:
        if not (CONTROL / "threads").exists():
            _run("mount", "-t", "nfsd", "nfsd", str(CONTROL))
        if (CONTROL / "threads").read_text().strip() == "0":
            _run("rpc.nfsd", "--no-nfs-version", "3", "2")
            stack.callback(subprocess.run, ["rpc.nfsd", "0"], check=False)
        mountd = subprocess.Popen(["rpc.mountd", "--foreground", "--no-nfs-version", "3"])
        stack.callback(mountd.wait)
        stack.callback(mountd.terminate)
        options = "rw,no_root_squash,insecure,no_subtree_check,fsid=54000"
        _run("exportfs", "-i", "-o", options, f"127.0.0.1:{path}")
        stack.callback(subprocess.run, ["exportfs", "-u", f"127.0.0.1:{path}"], check=False)
        yield


@contextmanager
def mounted(path: Path, at: Path) -> Iterator[Path]:
    """The export of `path` as a client of its own, which shares no cache. Raises `NfsUnavailable`."""
    at.mkdir()
    _run("mount", "-t", "nfs4", "-o", "nosharecache,soft,timeo=50", f"127.0.0.1:{path}", str(at))
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
