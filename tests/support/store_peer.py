"""An instance as a process on a node of its own (`store_node`), told what to do a line at a time.

    python -m tests.support.store_peer ROLE PATH

Each line of input is a JSON list, `["encode", 0, 1]` or another method of `Peer` and the numbers of items;
each answer is a line of JSON.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support.store_items import IDENTITY, Items, tensor_of
from tests.support.store_node import REPOSITORY, node_command
from tests.support.store_workers import Pod

ITEMS = Items(seed=1, count=1000)


class Peer:
    def __init__(self, role: str, path: str):
        extra = {"shared_storage_path": path, "lease_seconds": 30.0}
        self.pod = Pod("ECSharedStorageConnector", role, extra, IDENTITY)

    def encode(self, *numbers: int) -> dict[int, str]:
        """What the primer's answer says of each item."""
        items = {ITEMS[n].mm_hash: n for n in numbers}
        _, output = self.pod.encode([ITEMS[n] for n in numbers])
        self.pod.forget()
        said = {items[key]: "saved" for key in output.finished_sending}
        return said | {items[key]: reason for key, reason in output.failed_sending.items()}

    def look_up(self, *numbers: int) -> dict[int, str]:
        """Leases what is there."""
        return {n: "there" if self.pod.has(ITEMS[n]) else "missing" for n in numbers}

    def load(self, *numbers: int) -> dict[int, str]:
        output = self.pod.fetch([ITEMS[n] for n in numbers])
        said = {}
        for n in numbers:
            found = self.pod.cache.pop(ITEMS[n].mm_hash, None)
            exact = found is not None and torch.equal(found, tensor_of(ITEMS[n].mm_hash))
            said[n] = "exact" if exact else output.failed_recving.get(ITEMS[n].mm_hash, "wrong")
        return said

    def acknowledged(self) -> list[str]:
        """What readers have told the producer since it last asked."""
        return self.pod.step().acknowledged


class RemotePeer:
    """The other end of `Peer`."""

    def __init__(self, process: "subprocess.Popen[str]"):
        self._process = process

    def ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the peer ended with {self._process.wait()}"
        said = json.loads(answer)
        return {int(n): words for n, words in said.items()} if isinstance(said, dict) else said


@contextmanager
def peer(role: str, path: Path, *, uid: int, gid: int, volumes: Mapping[Path, Path]) -> Iterator[RemotePeer]:
    """An instance that sees the store at `path`, by its own mounts and as its own user."""
    command = [sys.executable, "-m", __name__, role, str(path)]
    process = subprocess.Popen(
        node_command(command, uid=uid, gid=gid, volumes=volumes),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        yield RemotePeer(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def main(role: str, path: str) -> None:
    torch.set_num_threads(1)
    one = Peer(role, path)
    for line in sys.stdin:
        method, *numbers = json.loads(line)
        print(json.dumps(getattr(one, method)(*numbers)), flush=True)
    one.pod.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
