"""Putting an instance together: checkpoint, family, connector, scheduler and runner for its role."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from epd_engine.attention.base import Attention
from epd_engine.attention.choice import activate_kernels, choose_attention
from epd_engine.attention.kv_cache import KVCache
from epd_engine.attention.sdpa import SdpaAttention
from epd_engine.config import EngineConfig
from epd_engine.core.encode_scheduler import EncodeScheduler
from epd_engine.core.encoder_cache_manager import EncoderCacheManager
from epd_engine.core.kv_blocks import BlockPool
from epd_engine.core.media_planner import MediaPlanner
from epd_engine.core.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from epd_engine.core.request import Request, RequestError
from epd_engine.core.sampling import SamplingParams
from epd_engine.core.scheduler import Scheduler, SchedulerLimits
from epd_engine.core.scheduler_interface import SchedulerInterface
from epd_engine.ec_store.statistics import TransferStats
from epd_engine.ec_transfer.base import ECConnectorBase, ECConnectorRole, ECModelIdentity
from epd_engine.ec_transfer.factory import ECConnectorFactory
from epd_engine.kv_transfer.base import KVConnectorBase, KVConnectorRole, KVModelIdentity
from epd_engine.kv_transfer.factory import KVConnectorFactory
from epd_engine.layers.huge_pages import use_huge_pages
from epd_engine.layers.packed_linear import pack_linears
from epd_engine.lookahead import Lookahead
from epd_engine.machine.allocator import give_back_freed_memory
from epd_engine.machine.device import check_alive, find_device, free_memory
from epd_engine.machine.mapped_files import forget_pages
from epd_engine.machine.memory import MemoryNeeds, kv_tokens
from epd_engine.models.base import ModelFamily
from epd_engine.models.checkpoint import Checkpoint, CheckpointError
from epd_engine.models.fingerprint import language_fingerprint, model_fingerprint
from epd_engine.models.registry import family_of
from epd_engine.worker.model_runner import ModelRunner

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class StepStats:
    """Totals since start; `integrity_problems` as of the last time at rest."""

    steps: int = 0
    busy_seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ec_hits: int = 0
    ec_loads: int = 0
    ec_load_failures: int = 0
    ec_saves: int = 0
    ec_save_failures: int = 0
    cached_prompt_tokens: int = 0
    kv_loads: int = 0
    kv_load_failures: int = 0
    kv_saves: int = 0
    kv_save_failures: int = 0
    integrity_problems: int = 0


class Engine:
    """One instance's synchronous core: `add`, `abort`, `step`. Not thread-safe; the loop owns it."""

    def __init__(self, config: EngineConfig):
        """Loads the weights of this role. Raises `CheckpointError`, `DeviceError`, `ECConfigError` or
        `KVConfigError`."""
        self.config = config
        checkpoint = Checkpoint.find(config.model, config.revision)
        family_class = family_of(checkpoint)
        dtype = _dtype(config, checkpoint)
        self.family: ModelFamily = family_class(checkpoint, dtype, find_device(config.device, dtype))
        self.fingerprint = model_fingerprint(checkpoint, self.family.tower_prefixes)
        self.max_model_len = self._model_len()
        self.pool = BlockPool(self._num_blocks(), config.block_size)
        scheduler_side, worker_side = self._connectors()
        self.kv_identity = self._kv_identity(checkpoint)
        kv_scheduler_side, self._kv_worker_side = self._kv_connectors()
        activate_kernels(self.family.device)
        kv_cache = self._kv_cache()
        self._attention: type[Attention] = SdpaAttention
        if kv_cache is not None:  # before the tower, which is tried by the kernels that are left
            self._attention = choose_attention(kv_cache, self.family.num_heads)
        self._num_parameters = self._load_weights(checkpoint)
        self.encoder_cache = EncoderCacheManager(config.encoder_cache_size)
        planner = MediaPlanner(
            self.encoder_cache,
            scheduler_side,
            max_encoder_embeds=config.max_encoder_embeds,
            can_compute=config.has_tower,
        )
        self.scheduler: SchedulerInterface = (
            EncodeScheduler(planner)
            if config.is_encode_only
            else Scheduler(
                SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, self.max_model_len),
                self.pool,
                planner,
                kv_scheduler_side,
            )
        )
        self.runner = ModelRunner(self.family, worker_side, kv_cache, self._kv_worker_side, self._attention)
        self._lookahead = (
            Lookahead(self.scheduler, self.runner) if isinstance(self.scheduler, Scheduler) else None
        )
        self._connectors_made = [c for c in (scheduler_side, worker_side) if c is not None]
        self._kv_connectors_made = [c for c in (kv_scheduler_side, self._kv_worker_side) if c is not None]
        self.is_stalled = False
        self.stats = StepStats()

    @property
    def has_work(self) -> bool:
        return self.scheduler.num_running + self.scheduler.num_waiting > 0

    def add(self, request: Request) -> None:
        """Raises `RequestError` when the request could never be served or the queue is full."""
        limit = self.config.max_waiting + self.config.max_num_seqs
        if self.scheduler.num_waiting + self.scheduler.num_running >= limit:
            raise RequestError(429, "queue_full", f"{limit} requests are in flight already")
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.runner.forget(request_id)

    def step(self) -> list[RequestUpdate]:
        """One `schedule -> execute -> update`. A step that fails ends its own requests and no others.

        Worth a call now and then without work too: connectors look after their stores. `is_stalled` says
        afterwards that nothing could be done, so that an immediate next call would not either.
        """
        if not self.has_work:
            self._check_integrity()
        prepared = self._lookahead.take() if self._lookahead is not None else None
        step, inputs = prepared or (self.scheduler.schedule(), None)
        self.is_stalled = step.is_empty
        began = time.monotonic()
        try:
            output = self.runner.poll() if step.is_empty else self.runner.execute(step, inputs)
        except Exception:  # whatever a kernel or a model raises must not end the other requests
            log.exception("a step failed; its requests are ended")
            check_alive(self.family.device)  # else no later step succeeds: better to end, and be started anew
            error = RequestError(500, "internal_error", "the engine failed on this request; see its log")
            updates = self.scheduler.fail_step(step, error)
        else:
            updates = self.scheduler.update(step, output)
            self._count(step, output)
        if not step.is_empty:
            self.stats.busy_seconds += time.monotonic() - began
        for update in updates:
            if update.is_last:
                self.runner.forget(update.request_id)
        return updates

    def smoke(self) -> None:
        """Runs one item or one token through the whole path that this role serves, outside the store."""
        if self.config.has_tower:
            for modality in sorted(self.family.modalities):
                blank = self.family.process(modality, self.family.blank(modality), {})
                self.family.encode([blank.features])
        if not self.config.is_encode_only:
            positions, delta = self.family.positions(1, [])
            self.add(Request("smoke", [0], positions, delta, [], SamplingParams(max_tokens=1, temperature=0)))
            while self.has_work:
                for update in self.step():
                    if update.error is not None:
                        raise update.error
            self.stats = StepStats()  # of what clients ask

    def ec_statistics(self) -> Mapping[str, TransferStats]:
        """What the connector's worker side has moved, by tier of the store."""
        return self._connectors_made[1].statistics() if self._connectors_made else {}

    def kv_statistics(self) -> TransferStats:
        """What the KV connector's worker side has moved."""
        return TransferStats() if self._kv_worker_side is None else self._kv_worker_side.statistics()

    def on_progress(self, wake: Callable[[], None]) -> None:
        """`wake` is called, in any thread, when something in the background makes a step worthwhile."""
        if self._kv_worker_side is not None:
            self._kv_worker_side.on_progress = wake

    def describe(self) -> dict[str, Any]:
        """What an operator wants to see in the log once."""
        return {
            "role": self.config.ec_transfer.ec_role if self.config.ec_transfer else "aggregated",
            "kv_role": self.config.kv_transfer.kv_role if self.config.kv_transfer else None,
            "model_fingerprint": self.fingerprint,
            "dtype": str(self.family.dtype).removeprefix("torch."),
            "parameters": self._num_parameters,
            "attention": None if self.config.is_encode_only else self._attention.__name__,
            "max_model_len": self.max_model_len,
            "kv_cache_tokens": self.pool.num_blocks * self.pool.block_size,
        }

    def shutdown(self) -> None:
        for connector in self._connectors_made:
            connector.shutdown()
        for kv_connector in self._kv_connectors_made:
            kv_connector.shutdown()

    def _connectors(self) -> tuple[ECConnectorBase | None, ECConnectorBase | None]:
        if self.config.ec_transfer is None:
            return None, None
        identity = ECModelIdentity(self.fingerprint, self.family.embed_width, self.family.dtype)
        return (
            ECConnectorFactory.create_connector(self.config.ec_transfer, ECConnectorRole.SCHEDULER, identity),
            ECConnectorFactory.create_connector(self.config.ec_transfer, ECConnectorRole.WORKER, identity),
        )

    def _kv_identity(self, checkpoint: Checkpoint) -> KVModelIdentity | None:
        if self.config.kv_transfer is None:
            return None
        shape = self.family.kv_shape
        return KVModelIdentity(
            language_fingerprint(checkpoint),
            self.family.dtype,
            self.config.block_size,
            shape.num_layers,
            shape.kv_heads,
            shape.head_dim,
            self.family.vocab_size,
        )

    def _kv_connectors(self) -> tuple[KVConnectorBase | None, KVConnectorBase | None]:
        if self.config.kv_transfer is None or self.kv_identity is None:
            return None, None
        return (
            KVConnectorFactory.create_connector(
                self.config.kv_transfer, KVConnectorRole.SCHEDULER, self.kv_identity
            ),
            KVConnectorFactory.create_connector(
                self.config.kv_transfer, KVConnectorRole.WORKER, self.kv_identity
            ),
        )

    def _model_len(self) -> int:
        wanted, able = self.config.max_model_len, self.family.max_model_len
        if wanted is not None and wanted > able:
            raise CheckpointError(f"--max-model-len {wanted} exceeds what the model was made for ({able})")
        return wanted or able

    def _num_blocks(self) -> int:
        """Of KV, before anything is loaded: what memory cannot hold is said at once."""
        config, family = self.config, self.family
        asked = config.kv_cache_tokens
        if asked is not None and asked < self.max_model_len:
            raise CheckpointError(
                f"--kv-cache-tokens {asked} is less than one request may need (max model length "
                f"{self.max_model_len}); raise it or lower --max-model-len"
            )
        shape, size = family.kv_shape, family.dtype.itemsize
        needs = MemoryNeeds(
            weights=family.weight_bytes(tower=config.has_tower, language=not config.is_encode_only),
            encoder_cache=config.encoder_cache_size * family.embed_width * size,
            kv_token=0 if config.is_encode_only else shape.values_per_token * size,
        )
        tokens = kv_tokens(needs, free_memory(family.device), self.max_model_len, asked)
        return 0 if config.is_encode_only else -(-tokens // config.block_size)

    def _load_weights(self, checkpoint: Checkpoint) -> int:
        """Of this role; returns how many numbers they are."""
        if self.config.has_tower:
            self.family.load_tower()
        if not self.config.is_encode_only:
            self.family.load_language()
        modules = self.family.modules()
        num_parameters = sum(p.numel() for module in modules for p in module.parameters())
        if sum(map(pack_linears, modules)):
            forget_pages(set(checkpoint.tensor_files.values()))  # most of them are held packed now
            give_back_freed_memory()
            use_huge_pages(modules)
        return num_parameters

    def _kv_cache(self) -> KVCache | None:
        if self.config.is_encode_only:
            return None
        shape = self.family.kv_shape
        return KVCache(
            num_layers=shape.num_layers,
            num_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=self.family.dtype,
            device=self.family.device,
        )

    def _check_integrity(self) -> None:
        """At rest nothing is held. A leak is a defect of ours: it is told once, by its words and a metric."""
        problems = self.scheduler.problems()
        if problems and not self.stats.integrity_problems:
            log.error("the books do not balance at rest: %s", "; ".join(problems))
        self.stats.integrity_problems = len(problems)

    def _count(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        stats, ec = self.stats, output.ec_output
        stats.steps += 1
        stats.generated_tokens += len(output.sampled)
        stats.prompt_tokens += sum(
            max(0, min(c.end, c.request.num_prompt_tokens) - c.start)
            for c in step.chunks
            if c.request.request_id not in output.skipped
        )
        stats.cached_prompt_tokens += step.cached_prompt_tokens
        stats.kv_loads += len(output.kv_output.finished_recving)
        stats.kv_load_failures += len(output.kv_output.failed_recving)
        stats.kv_saves += len(output.kv_output.finished_sending)
        stats.kv_save_failures += len(output.kv_output.failed_sending)
        stats.ec_hits += len(step.external_load_encoder_input)
        stats.ec_loads += len(ec.finished_recving)
        stats.ec_load_failures += len(ec.failed_recving)
        stats.ec_saves += len(ec.finished_sending)
        stats.ec_save_failures += len(ec.failed_sending)


def _dtype(config: EngineConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The flag's dtype, or with "auto" the checkpoint's own."""
    name: str = config.dtype
    if name == "auto":
        assert checkpoint.config is not None
        said = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"
        name = said if said in DTYPES else "float32"
    return DTYPES[name]
