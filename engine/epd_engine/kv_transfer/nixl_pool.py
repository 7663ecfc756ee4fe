"""The KV pool behind a NIXL agent: registered memory that peers read, and reads of theirs.

The agents have no progress thread, which would burn a core of an idle instance: whoever owns one calls
`progress` or waits in `read` while something is on its way.
"""

import base64
import importlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from epd_engine.attention.kv_cache import KVCache
from epd_engine.kv_transfer.base import KVModelIdentity
from epd_engine.kv_transfer.config import KVConfigError

POLL_SECONDS = 0.0002
# The wheels for one CUDA version bring the API under a name of their own; "nixl" chooses among them.
_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")


class PullError(Exception):
    """A prompt's KV could not be had; the message is for people."""


@dataclass(frozen=True)
class PoolView:
    """What a peer must know to read a pool. `bases` are the addresses of its tensors: keys, then values, of
    each layer."""

    agent: str
    metadata: bytes
    memory: str
    device: int
    bases: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "metadata": base64.b64encode(self.metadata).decode()}

    @classmethod
    def from_json(cls, said: Mapping[str, Any], identity: KVModelIdentity) -> Self:
        """Raises `PullError` for what cannot be a pool of this identity."""
        try:
            view = cls(
                str(said["agent"]),
                base64.b64decode(said["metadata"], validate=True),
                str(said["memory"]),
                int(said["device"]),
                tuple(map(int, said["bases"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PullError(f"prefill's answer cannot be read: {error!r:.200}") from error
        if view.memory not in ("DRAM", "VRAM") or len(view.bases) != 2 * identity.num_layers:
            raise PullError("prefill's answer describes no pool of this model")
        return view


class PoolAgent:
    """A NIXL agent with this instance's pool registered. For one thread at a time."""

    def __init__(self, cache: KVCache, identity: KVModelIdentity):
        """Raises `KVConfigError` where NIXL cannot be used here."""
        api = _nixl()
        self._tensors = [tensor for layer in cache.layers for tensor in layer]
        self._memory = "VRAM" if cache.device.type == "cuda" else "DRAM"
        self._device = cache.device.index or 0
        self._block_bytes = identity.layer_bytes_per_block // 2
        self._peers: set[str] = set()
        name = secrets.token_hex(8)
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(name, config)
            self._agent.register_memory(self._tensors)
            self.view = PoolView(
                name,
                self._agent.get_agent_metadata(),
                self._memory,
                self._device,
                tuple(tensor.data_ptr() for tensor in self._tensors),
            )
        except Exception as error:  # NIXL's own exceptions have no base but this
            raise KVConfigError(f"NIXL cannot be used here: {error!r:.300}") from error

    @property
    def num_peers(self) -> int:
        """How many pools it has read from."""
        return len(self._peers)

    def progress(self) -> None:
        """Serves what peers ask of this memory, where the transport needs a hand for it."""
        self._agent.get_new_notifs()

    def read(
        self, peer: PoolView, remote_blocks: Sequence[int], local_blocks: Sequence[int], deadline: float
    ) -> int:
        """Reads blocks of every layer and waits for them until `deadline` (monotonic); returns their bytes.

        Raises `PullError`: then late data may still arrive until the agent is closed.
        """
        runs = block_runs(remote_blocks, local_blocks)
        sizes = runs[:, 2] * self._block_bytes
        remote = self._places(peer.bases, runs[:, 0], sizes, peer.device)
        local = self._places(self.view.bases, runs[:, 1], sizes, self._device)
        try:
            state = self._transfer(peer, local, remote, deadline)
        except Exception as error:  # noqa: BLE001 - as above
            state = repr(error)
        if state != "DONE":  # raised here: a traceback must not keep the agent from being closed
            raise PullError(
                "prefill's memory did not arrive in time" if state == "PROC" else f"NIXL: {state}"
            )
        return int(sizes.sum()) * len(self._tensors)

    def close(self) -> None:
        """Nothing is written into the pool afterwards, whatever was on its way."""
        self._agent = None

    def _transfer(self, peer: PoolView, local: np.ndarray, remote: np.ndarray, deadline: float) -> str:
        """The state in which it is once it has ended, or at the deadline."""
        if peer.agent not in self._peers:
            self._agent.add_remote_agent(peer.metadata)
            self._peers.add(peer.agent)
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(local, self._memory),
            self._agent.get_xfer_descs(remote, peer.memory),
            peer.agent,
        )
        state: str = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            state = self._agent.check_xfer_state(handle)
        if state == "DONE":
            handle.release()
        return state

    def _places(self, bases: Sequence[int], blocks: np.ndarray, sizes: np.ndarray, device: int) -> np.ndarray:
        """Address, length and device of each run in each tensor: `[tensors * runs, 3]`."""
        addresses = np.asarray(bases, np.uint64)[:, None] + (blocks * self._block_bytes).astype(np.uint64)
        lengths = np.broadcast_to(sizes.astype(np.uint64), addresses.shape)
        return np.stack([addresses, lengths, np.full_like(addresses, device)], -1).reshape(-1, 3)


def block_runs(remote: Sequence[int], local: Sequence[int]) -> np.ndarray:
    """Blocks that lie in a row on both sides, as one: first remote, first local and number, `[runs, 3]`."""
    theirs, ours = np.asarray(remote, np.int64), np.asarray(local, np.int64)
    is_first = np.ones(len(theirs), bool)
    is_first[1:] = (np.diff(theirs) != 1) | (np.diff(ours) != 1)
    begins = np.flatnonzero(is_first)
    return np.stack([theirs[begins], ours[begins], np.diff(begins, append=len(theirs))], -1)


def _nixl() -> Any:
    for module in _MODULES:
        try:
            api = importlib.import_module(module)
        except ImportError:
            continue
        # Its package writes lines of its own form to the console; warnings go where ours go.
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        return api
    raise KVConfigError("kv_connector NixlKVConnector needs the package nixl: install the extra `nixl`")
