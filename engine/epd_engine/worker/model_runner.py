"""Executes one step's plan: load, encode, publish; the language model over packed tokens; sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from epd_engine.attention.base import Attention
from epd_engine.attention.kv_cache import KVCache
from epd_engine.attention.packed_batch import PackedBatch, Span
from epd_engine.attention.sdpa import SdpaAttention
from epd_engine.core.encoder_cache_manager import EncoderCacheMoves
from epd_engine.core.output import Chunk, ModelRunnerOutput, SchedulerOutput
from epd_engine.core.request import Request
from epd_engine.ec_transfer.base import ECConnectorBase
from epd_engine.kv_transfer.base import KVConnectorBase
from epd_engine.models.base import ModelFamily
from epd_engine.worker.ec_step import ec_step
from epd_engine.worker.encoder_runner import EncoderRunner
from epd_engine.worker.kv_step import kv_step
from epd_engine.worker.sampler import Sampler


@dataclass(frozen=True)
class PackedInputs:
    """What the language model needs of chunks beside their tokens: rotary positions `[axes, tokens]`, and
    where their KV lies."""

    positions: torch.Tensor
    batch: PackedBatch


class ModelRunner:
    """The worker: owns the encoder cache's tensors and the KV tensors, and decides nothing.

    `kv_cache` is None on an encode-only instance; `attention` is how tokens attend over it.
    """

    def __init__(
        self,
        family: ModelFamily,
        connector: ECConnectorBase | None,
        kv_cache: KVCache | None,
        kv_connector: KVConnectorBase | None = None,
        attention: type[Attention] = SdpaAttention,
    ):
        self._family, self._connector = family, connector
        self._kv_cache, self._kv_connector, self._attention = kv_cache, kv_connector, attention
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self._aside: dict[str, torch.Tensor] = {}  # in host memory
        self.encoder = EncoderRunner(family, self.encoder_cache)
        self._sampler = Sampler()
        # Called when the device has got the language model's work of a step, before its tokens are read.
        self.meanwhile: Callable[[SchedulerOutput], None] = lambda _: None
        if connector is not None:
            connector.register_caches(self.encoder_cache, family.device)
        if kv_connector is not None:
            assert kv_cache is not None, "an instance that exchanges KV has some"
            kv_connector.register_kv_caches(kv_cache)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput, inputs: PackedInputs | None = None) -> ModelRunnerOutput:
        """`inputs` are those of `step` where they are made already; then it has no media."""
        output = ModelRunnerOutput()
        self._move(step.encoder_cache_moves)
        with kv_step(self._kv_connector, step.kv_connector_metadata) as output.kv_output:
            self._execute(step, inputs, output)
        return output

    @torch.inference_mode()
    def pack(self, chunks: Sequence[Chunk]) -> PackedInputs:
        """The inputs of `chunks`, whose tokens need not be known yet."""
        positions = _positions(chunks).to(self._family.device, non_blocking=True)
        return PackedInputs(positions, self._pack(chunks))

    def poll(self) -> ModelRunnerOutput:
        """What has been done in the background, where a step has nothing to execute."""
        output = ModelRunnerOutput()
        if self._kv_connector is not None:
            output.kv_output = self._kv_connector.get_finished()
        return output

    def _execute(self, step: SchedulerOutput, inputs: PackedInputs | None, output: ModelRunnerOutput) -> None:
        with ec_step(
            self._connector,
            step.ec_connector_metadata,
            self.encoder_cache,
            wait_for_saves=step.wait_for_saves,
        ) as output.ec_output:
            output.encode_errors = self.encoder.run(
                [request.media[index] for request, index in step.scheduled_encoder_inputs]
            )
            if self._connector is not None:
                for request, index in step.scheduled_encoder_inputs + step.republish_encoder_input:
                    key = request.media[index].mm_hash
                    if key in self.encoder_cache:
                        self._connector.save_caches(self.encoder_cache, key)
            chunks = [c for c in step.chunks if self._has_media(c, output)]
            if not chunks:
                return
            logits = self._run_language_model(chunks, inputs or self.pack(chunks))
            if sampling := [c.request for c in chunks if c.samples]:
                self.meanwhile(step)
                self._sample(sampling, logits, output)

    def _move(self, moves: EncoderCacheMoves) -> None:
        for key in moves.freed:
            self.encoder_cache.pop(key, None)
            self._aside.pop(key, None)
        for key in moves.set_aside:
            self._aside[key] = self.encoder_cache.pop(key).to("cpu")
        for key in moves.brought_back:
            self.encoder_cache[key] = self._aside.pop(key).to(self._family.device)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._sampler.forget(request_id)

    def _has_media(self, chunk: Chunk, output: ModelRunnerOutput) -> bool:
        request = chunk.request
        needed = {request.media[i].mm_hash for i in request.media_in(chunk.start, chunk.end)}
        if missing := sorted(needed - self.encoder_cache.keys()):
            output.skipped[request.request_id] = missing
        return not missing

    def _run_language_model(self, chunks: Sequence[Chunk], inputs: PackedInputs) -> torch.Tensor:
        """Logits `[rows, vocab]` of the chunks that sample; the device may not have computed them yet."""
        hidden = self._family.forward(self._embeds(chunks), inputs.positions, inputs.batch)
        return self._family.logits(hidden)

    def _sample(self, requests: Sequence[Request], logits: torch.Tensor, output: ModelRunnerOutput) -> None:
        chosen = self._sampler.sample(requests, logits)
        ids = [request.request_id for request in requests]
        output.sampled.update(zip(ids, chosen.tokens, strict=True))
        output.logprobs.update((ids[row], said) for row, said in chosen.logprobs.items())
        output.sample_problems.update((ids[row], reason) for row, reason in chosen.problems.items())

    def _embeds(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Embeddings `[tokens, width]`: the tokens' own, and encoder outputs over the placeholders."""
        tokens = [token for c in chunks for token in c.request.tokens(c.start, c.end)]
        embeds = self._family.embed(torch.tensor(tokens, device=self._family.device))
        place = 0
        for chunk in chunks:
            for index in chunk.request.media_in(chunk.start, chunk.end):
                item = chunk.request.media[index]
                begin, end = max(chunk.start, item.offset), min(chunk.end, item.end)
                rows = self.encoder_cache[item.mm_hash][begin - item.offset : end - item.offset]
                embeds[place + begin - chunk.start : place + end - chunk.start] = rows.to(embeds.dtype)
            place += chunk.length
        return embeds

    def _pack(self, chunks: Sequence[Chunk]) -> PackedBatch:
        assert self._kv_cache is not None, "an instance with a language model has a KV cache"
        spans, begin = [], 0
        for chunk in chunks:
            # Beyond what is known where the token before is being computed yet.
            is_wanted = chunk.end >= chunk.request.num_tokens
            spans.append(Span(begin, chunk.start, chunk.end, chunk.request.block_ids, is_wanted))
            begin += chunk.length
        return PackedBatch(self._kv_cache, spans, self._on_layer(chunks), self._attention)

    def _on_layer(self, chunks: Sequence[Chunk]) -> Callable[[int], None] | None:
        """What becomes of a layer's KV once it is computed."""
        connector = self._kv_connector
        if connector is None:
            return None
        request_ids = frozenset(chunk.request.request_id for chunk in chunks)
        return lambda layer: connector.save_kv_layer(layer, request_ids)


def _positions(chunks: Sequence[Chunk]) -> torch.Tensor:
    """Rotary positions `[axes, tokens]`; in one go where all are tokens of answers, as most steps are."""
    if any(c.length > 1 or c.start < c.request.num_prompt_tokens for c in chunks):
        return torch.cat([c.request.position_ids(c.start, c.end) for c in chunks], dim=1)
    following = torch.tensor([c.start + c.request.position_delta for c in chunks])
    return following.expand(len(chunks[0].request.positions), -1)
