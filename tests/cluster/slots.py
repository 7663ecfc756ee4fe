"""Slots: which clusters there are on this machine, and how the remains of one are removed.

A slot's number decides everything a cluster takes of the machine (addresses, a network interface, cgroups,
a state directory), so cleaning needs no record of what was made. The lock of a slot is held as long as its
owner lives; a slot with remains whose lock is free belongs to a run that was killed.
"""

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Self

from .addresses import Network
from .command import POLL_S, ClusterError, Unavailable
from .paths import CACHE_ROOT, state_root
from .processes import kill_all

COMMAND_SLOT = 0
"""Of `make cluster-up`, which ends while its cluster goes on; so its lock tells nothing."""
SLOTS = 16
CGROUPS = Path("/sys/fs/cgroup")
MOUNTS = Path("/proc/self/mounts")
CLEAN_S = 20.0


class Slot:
    """One slot, held by this process."""

    def __init__(self, number: int, lock: int) -> None:
        self.number = number
        self.state = state_directory(number)
        self.network = Network(number)
        self._lock = lock

    @classmethod
    def take(cls, number: int) -> Self | None:
        """This slot, unless another process holds it."""
        descriptor = os.open(state_root() / f"{number}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(number, descriptor)

    @classmethod
    def take_free(cls) -> Self:
        """A free slot. The remains of killed runs are removed, whichever slot they lie in."""
        taken: Self | None = None
        for number in range(COMMAND_SLOT + 1, SLOTS):
            slot = cls.take(number)
            if slot is None:
                continue
            slot.clean()
            if taken is None:
                taken = slot
            else:
                slot.release()
        if taken is None:
            raise Unavailable(f"all {SLOTS - 1} slots for clusters are in use")
        return taken

    @property
    def cgroup(self) -> str:
        """Name of the cgroup of the node's pods."""
        return f"epd-cluster-{self.number}"

    @property
    def containers(self) -> Path:
        """containerd's images and layers; kept, since bringing in an image takes long."""
        return CACHE_ROOT / "containerd" / str(self.number)

    def clean(self) -> None:
        """Removes everything of the cluster in this slot. Does nothing where there is none."""
        if not self.state.exists():
            return
        kill_all(self.state)
        self._remove_interface()
        self._remove_cgroups()
        self._remove_state()

    def release(self) -> None:
        """Lets others have the slot."""
        os.close(self._lock)

    def _remove_interface(self) -> None:
        """It goes with the network namespace, soon after its last process."""
        interface = Path("/sys/class/net") / self.network.interface
        deadline = time.monotonic() + CLEAN_S
        while interface.exists():
            subprocess.run(["ip", "link", "delete", self.network.interface], capture_output=True, check=False)
            _wait(deadline, f"network interface {self.network.interface}")

    def _remove_cgroups(self) -> None:
        deadline = time.monotonic() + CLEAN_S
        for top in CGROUPS.glob(f"*/{self.cgroup}"):
            while top.exists():
                for directory, _, _ in os.walk(top, topdown=False):
                    try:
                        os.rmdir(directory)
                    except OSError:
                        # Busy until the kernel has buried the last of its processes.
                        pass
                if top.exists():
                    _wait(deadline, f"cgroup {top}")

    def _remove_state(self) -> None:
        """Never through a mount: what is mounted there is not ours to delete."""
        deadline = time.monotonic() + CLEAN_S
        while mounts := [line for line in MOUNTS.read_text().splitlines() if f" {self.state}/" in line]:
            for line in mounts:
                subprocess.run(["umount", line.split()[1]], capture_output=True, check=False)
            _wait(deadline, f"mounts {mounts}")
        shutil.rmtree(self.state)


def state_directory(number: int) -> Path:
    """Where the cluster of a slot keeps its state."""
    return state_root() / str(number)


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise ClusterError(f"does not go away: {what}")
    time.sleep(POLL_S)
