"""`NixlKVConnector`: decode reads a prompt's KV out of prefill's memory, by whatever transport UCX finds
between the two (RDMA, shared memory, TCP).

What if a peer is slow, dead, restarted or lies?
- Prefill is dead, stands still, or was started anew: the pull fails, at the latest after `pull_seconds`.
- Decode never comes: prefill frees the blocks at the end of their lease.
- Decode dies or stands still while it pulls: its connection ends, at the latest after `pull_seconds`; another
  may come until the lease ends.
- Blocks were freed while they were being read: prefill does not confirm, and decode does not use them.
- Decode preempts a request: it keeps a copy of the prompt's KV, for prefill has none any more.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from epd_engine.core.remote_kv import RemoteDecode, RemotePrefill, prompt_digest
from epd_engine.core.request import Request
from epd_engine.ec_store.statistics import TransferStats
from epd_engine.kv_transfer.base import (
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVModelIdentity,
)
from epd_engine.kv_transfer.block_file import gather
from epd_engine.kv_transfer.config import KVConfigError, KVTransferConfig, read_extra_config
from epd_engine.kv_transfer.nixl_pool import PoolAgent, PullError
from epd_engine.kv_transfer.params import check_prompt_length, missing, prefilled
from epd_engine.kv_transfer.pull_server import Offer, PullServer
from epd_engine.kv_transfer.puller import BlockPull, Puller, Source

if TYPE_CHECKING:
    from epd_engine.attention.kv_cache import KVCache
    from epd_engine.core.output import SchedulerOutput

log = logging.getLogger(__name__)

DEFAULTS: Mapping[str, Any] = {
    "lease_seconds": 60.0,  # how long a prompt's blocks wait for a decode instance
    "pull_seconds": 30.0,  # how long a pull may take
}


@dataclass(frozen=True)
class BlockCopy:
    """A prompt's blocks from `first` on, to or from a copy of all of them outside the pool."""

    request_id: str
    first: int
    block_ids: tuple[int, ...]
    tokens_in_last: int


@dataclass
class PullPlan(KVConnectorMetadata):
    """A step's work. `withdrawals` are transfers of this instance, `drops` those of others, and `forgotten`
    requests whose copies are not needed any more."""

    offers: dict[str, Offer] = field(default_factory=dict)
    withdrawals: list[str] = field(default_factory=list)
    pulls: list[BlockPull] = field(default_factory=list)
    drops: list[Source] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    restores: list[BlockCopy] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return any((self.withdrawals, self.pulls, self.drops, self.copies, self.restores, self.forgotten))


class NixlKVConnector(KVConnectorBase):
    """Producers keep a prompt's blocks until they are pulled; consumers pull in the background."""

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, identity: KVModelIdentity):
        super().__init__(config, role, identity)
        extra = _read(config)
        self._lease_seconds, self._pull_seconds = extra["lease_seconds"], extra["pull_seconds"]
        self._host, self._port = config.kv_ip or "127.0.0.1", config.kv_port or 0
        self._engine_id = config.engine_id or secrets.token_hex(16)
        # Scheduler side
        self._plan = PullPlan()
        self._sending: dict[str, str] = {}  # request to transfer
        self._begun: set[str] = set()  # requests here whose KV was pulled, or is being
        self._copied: set[str] = set()  # those of them with a copy outside the pool
        # Worker side
        self._server: PullServer | None = None
        self._puller: Puller | None = None
        self._computed: frozenset[str] = frozenset()
        self._pulls: dict[str, tuple[Future[int], float]] = {}
        self._copies: dict[str, list[torch.Tensor]] = {}
        self._output = KVConnectorOutput()
        self._stats = TransferStats()

    # Scheduler side

    def check_request(self, request: Request) -> None:
        if not isinstance(request.kv, RemotePrefill):
            return
        check_prompt_length(request, request.kv)
        said = request.kv.connector
        host, port = said.get("host"), said.get("port")
        if not (isinstance(host, str) and 0 < len(host) < 256 and type(port) is int and 0 < port < 65536):
            raise missing("kv_transfer_params.connector does not say where it is to be pulled from")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        if not isinstance(request.kv, RemotePrefill):
            return 0
        if request.request_id in self._begun - self._copied:
            return 0
        return max(0, request.num_prompt_tokens - num_computed_tokens)

    def update_state_after_alloc(self, request: Request, num_external_tokens: int) -> None:
        assert isinstance(request.kv, RemotePrefill)
        first = (request.num_prompt_tokens - num_external_tokens) // self.identity.block_size
        copy = self._prompt_blocks(request, first)
        if request.request_id in self._copied:
            self._plan.restores.append(copy)
            return
        self._begun.add(request.request_id)
        self._plan.pulls.append(
            BlockPull(
                request.request_id,
                _source(request.kv),
                prompt_digest(request),
                first,
                copy.block_ids,
                copy.tokens_in_last,
            )
        )

    def request_preempted(self, request: Request) -> None:
        if isinstance(request.kv, RemotePrefill) and request.request_id not in self._copied:
            self._copied.add(request.request_id)
            self._plan.copies.append(self._prompt_blocks(request, 0))

    def build_connector_meta(self, step: "SchedulerOutput") -> PullPlan:
        plan, self._plan = self._plan, PullPlan()
        for chunk in step.chunks:
            request = chunk.request
            if isinstance(request.kv, RemoteDecode) and chunk.end >= request.num_prompt_tokens:
                transfer_id = self._sending.setdefault(request.request_id, secrets.token_hex(32))
                blocks = self._prompt_blocks(request, 0).block_ids
                plan.offers[request.request_id] = Offer(
                    request.request_id, transfer_id, prompt_digest(request), blocks
                )
        return plan

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if output.served_port is not None:
            self._port = output.served_port

    def request_finished(self, request: Request, *, completed: bool) -> tuple[bool, dict[str, Any] | None]:
        if isinstance(request.kv, RemotePrefill):
            self._forget(request.request_id, request.kv)
            return False, None
        transfer_id = self._sending.pop(request.request_id, None)
        if transfer_id is None:
            return False, None
        if not completed:
            self._plan.withdrawals.append(transfer_id)
            return False, None
        return True, prefilled(
            self.identity,
            engine_id=self._engine_id,
            transfer_id=transfer_id,
            num_prompt_tokens=request.num_prompt_tokens,
            first_token_id=request.output_token_ids[0],
            connector={"host": self._host, "port": self._port},
        )

    def discard(self, request_id: str) -> None:
        """No answer waits here: it is given while its blocks are kept."""

    def _forget(self, request_id: str, kv: RemotePrefill) -> None:
        if request_id not in self._begun:
            self._plan.drops.append(_source(kv))
        self._begun.discard(request_id)
        if request_id in self._copied:
            self._copied.discard(request_id)
            self._plan.forgotten.append(request_id)

    def _prompt_blocks(self, request: Request, first: int) -> BlockCopy:
        size, length = self.identity.block_size, request.num_prompt_tokens
        end = -(-length // size)
        return BlockCopy(
            request.request_id, first, tuple(request.block_ids[first:end]), length - (end - 1) * size
        )

    # Worker side

    def register_kv_caches(self, kv_cache: "KVCache") -> None:
        super().register_kv_caches(kv_cache)
        device = self.config.kv_buffer_device or kv_cache.device.type
        if device != kv_cache.device.type:
            raise KVConfigError(
                f"kv_buffer_device is {device!r}, and the KV lies on {kv_cache.device.type!r}"
            )
        if self.config.is_consumer:
            self._puller = Puller(self.identity, kv_cache, pull_seconds=self._pull_seconds)
        if self.config.is_producer:
            self._server = PullServer(
                self.identity,
                PoolAgent(kv_cache, self.identity),
                (self._host, self._port),
                lease_seconds=self._lease_seconds,
                pull_seconds=self._pull_seconds,
                on_progress=lambda: self.on_progress(),
            )
            self._output.served_port = self._server.port

    def start_load_kv(self) -> None:
        plan = self._bound
        self._computed = frozenset()
        for copy in plan.copies:  # before anything else may use these blocks
            self._copies[copy.request_id] = self._copy(copy)
        for copy in plan.restores:
            self._restore(copy)
        for request_id in plan.forgotten:
            self._copies.pop(request_id, None)
        if self._server is not None:
            for transfer_id in plan.withdrawals:
                self._server.withdraw(transfer_id)
        if self._puller is not None:
            for source in plan.drops:
                self._puller.drop(source)
            for pull in plan.pulls:
                future = self._puller.pull(pull, self.on_progress)
                self._pulls[pull.request_id] = future, time.perf_counter()

    def save_kv_layer(self, layer: int, request_ids: frozenset[str]) -> None:
        """The pool is where peers read."""
        self._computed = request_ids

    def wait_for_save(self) -> None:
        """Every layer is computed: the step's prompts can be had from now on."""
        for request_id in self._computed & self._bound.offers.keys():
            assert self._server is not None, "only producers are asked for a prompt's KV"
            self._server.offer(self._bound.offers[request_id])

    def get_finished(self) -> KVConnectorOutput:
        if self._server is not None:
            ended = self._server.take_ended()
            self._output.finished_sending.update(ended.pulled)
            self._output.failed_sending.update(ended.unclaimed)
            block_bytes = self.identity.layer_bytes_per_block * self.identity.num_layers
            self._stats.save_bytes += sum(ended.pulled.values()) * block_bytes
        for request_id, (future, begun) in list(self._pulls.items()):
            if future.done():
                del self._pulls[request_id]
                self._settle(request_id, future, time.perf_counter() - begun)
        output, self._output = self._output, KVConnectorOutput()
        return output

    def statistics(self) -> TransferStats:
        return self._stats

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._puller is not None:
            self._puller.close()

    @property
    def _bound(self) -> PullPlan:
        assert isinstance(self._metadata, PullPlan), "bound before use"
        return self._metadata

    def _settle(self, request_id: str, future: "Future[int]", seconds: float) -> None:
        try:
            self._stats.loaded(future.result(), seconds)
        except PullError as error:
            log.warning("KV cannot be pulled: %s", error, extra={"request_id": request_id})
            self._output.failed_recving[request_id] = str(error)
        else:
            self._output.finished_recving.add(request_id)

    def _copy(self, copy: BlockCopy) -> list[torch.Tensor]:
        ids = torch.tensor(copy.block_ids, device=self._kv_cache.device)
        return [gather(layer, ids, copy.tokens_in_last) for layer in self._kv_cache.layers]

    def _restore(self, copy: BlockCopy) -> None:
        ids = torch.tensor(copy.block_ids, device=self._kv_cache.device)
        for layer, saved in zip(self._kv_cache.layers, self._copies[copy.request_id], strict=True):
            for part, kept in zip(layer, saved[:, copy.first :], strict=True):
                part.index_copy_(0, ids, kept.to(part.device))
        self._output.finished_recving.add(copy.request_id)


def _source(kv: RemotePrefill) -> Source:
    return Source(kv.connector["host"], kv.connector["port"], kv.transfer_id)


def _read(config: KVTransferConfig) -> dict[str, Any]:
    extra = read_extra_config(config, DEFAULTS)
    for key in DEFAULTS:
        if extra[key] <= 0:
            raise KVConfigError(f"kv_connector_extra_config key {key!r} must be more than 0")
    port = config.kv_port
    if port is not None and not (type(port) is int and 0 <= port < 65536):
        raise KVConfigError("kv_port must be a port, 0 or nothing for any free one")
    return extra
