"""Executes one step's plan: load, encode, publish; the language model over packed tokens; sample."""

from collections.abc import Sequence

import torch

from epd_engine.core.output import Chunk, ModelRunnerOutput, SchedulerOutput
from epd_engine.core.request import Request
from epd_engine.ec_transfer.base import ECConnectorBase
from epd_engine.models.base import ModelFamily
from epd_engine.worker.ec_step import ec_step
from epd_engine.worker.encoder_runner import EncoderRunner
from epd_engine.worker.paged_attention import KVCache, PackedBatch, Span
from epd_engine.worker.sampler import Sampler


class ModelRunner:
    """The worker: owns the encoder cache's tensors and the KV tensors, and decides nothing.

    `kv_cache` is None on an encode-only instance.
    """

    def __init__(
        self,
        family: ModelFamily,
        connector: ECConnectorBase | None,
        kv_cache: KVCache | None,
    ):
        self._family, self._connector = family, connector
        self._kv_cache = kv_cache
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self.encoder = EncoderRunner(family, self.encoder_cache)
        self._sampler = Sampler()
        if connector is not None:
            connector.register_caches(self.encoder_cache, family.device)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = ModelRunnerOutput()
        for key in step.freed_encoder_hashes:
            self.encoder_cache.pop(key, None)
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
            if chunks:
                self._run_language_model(chunks, output)
        return output

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._sampler.forget(request_id)

    def _has_media(self, chunk: Chunk, output: ModelRunnerOutput) -> bool:
        request = chunk.request
        if all(
            request.media[i].mm_hash in self.encoder_cache for i in request.media_in(chunk.start, chunk.end)
        ):
            return True
        output.skipped.add(request.request_id)
        return False

    def _run_language_model(self, chunks: Sequence[Chunk], output: ModelRunnerOutput) -> None:
        embeds = self._embeds(chunks)
        positions = torch.cat([c.request.position_ids(c.start, c.end) for c in chunks], dim=1)
        hidden = self._family.forward(embeds, positions.to(self._family.device), batch=self._pack(chunks))
        ends = torch.tensor([c.length for c in chunks]).cumsum(0) - 1
        sampling = [(c.request, int(end)) for c, end in zip(chunks, ends, strict=True) if c.samples]
        if not sampling:
            return
        logits = self._family.logits(hidden[[end for _, end in sampling]])
        self._sample([request for request, _ in sampling], logits, output)

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
            spans.append(Span(begin, chunk.start, chunk.end, chunk.request.block_ids))
            begin += chunk.length
        return PackedBatch(self._kv_cache, spans)
