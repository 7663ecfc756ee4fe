"""From a chat request to what the engine runs: tokens, media items, positions, sampling."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from epd_engine.config import EngineConfig, MediaLimits
from epd_engine.core.remote_kv import RemoteDecode, RemoteKV, RemotePrefill
from epd_engine.core.request import MediaItem, Request, RequestError
from epd_engine.core.sampling import SamplingParams
from epd_engine.ec_store.keys import MediaContent, mm_hash
from epd_engine.engine import Engine
from epd_engine.kv_transfer import params as kv_params
from epd_engine.models.base import Decoded, MediaRefused
from epd_engine.server.audio import FORMATS, audio_content, decode_audio
from epd_engine.server.media import decode_base64, decode_image, image_content, read_source, refuse
from epd_engine.server.metrics import ServerMetrics
from epd_engine.server.protocol import (
    AudioEmbedsPart,
    AudioUrlPart,
    ChatCompletionRequest,
    EmbedsPart,
    InputAudioPart,
    RawMediaPart,
    TextPart,
    VideoEmbedsPart,
    VideoUrlPart,
)
from epd_engine.server.text import ChatTokenizer

T = TypeVar("T")
TEXT_WORKERS = 4  # threads that render, tokenize and compile: text does not queue behind pictures
MediaPart = RawMediaPart | EmbedsPart


class PromptBuilder:
    """Prepares requests off the event loop, in bounded pools of threads."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        metrics: ServerMetrics,
        arriving: Callable[[], AbstractContextManager[None]],
    ):
        """`arriving` is entered for the last of what makes a request ready, when its media are."""
        self._config: EngineConfig = engine.config
        self._engine, self._family = engine, engine.family
        self._tokenizer, self._metrics, self._arriving = tokenizer, metrics, arriving
        self._media_pool = ThreadPoolExecutor(engine.config.media.workers, "media")
        self._text_pool = ThreadPoolExecutor(TEXT_WORKERS, "text")

    async def build(self, body: ChatCompletionRequest, request_id: str) -> Request:
        """Raises `RequestError` in the caller's terms."""
        kv = self._remote_kv(body)
        parts = [
            (f"messages[{m}].content[{p}]", part)
            for m, message in enumerate(body.messages)
            if not isinstance(message.content, str)
            for p, part in enumerate(message.content)
            if not isinstance(part, TextPart)
        ]
        self._check_counts(parts)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._item(part, param, body, kv)) for param, part in parts]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one bad item is enough to refuse the request
        media = [task.result() for task in tasks]
        if self._config.is_encode_only:
            return self._encode_request(body, request_id, media)
        with self._arriving():
            return await _in_pool(self._text_pool, self._chat_request, body, request_id, media, kv)

    def shutdown(self) -> None:
        for pool in (self._media_pool, self._text_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _encode_request(
        self, body: ChatCompletionRequest, request_id: str, media: list[MediaItem]
    ) -> Request:
        if not media:
            raise RequestError(
                400, "no_media", "this instance only encodes media, and the request has none", "messages"
            )
        if body.stream:
            raise RequestError(
                400, "invalid_value", "this instance only encodes: nothing to stream", "stream"
            )
        positions, delta = self._family.positions(0, [])
        sampling = SamplingParams(max_tokens=1)
        return Request(request_id, [], positions, delta, media, sampling, priority=body.priority)

    def _remote_kv(self, body: ChatCompletionRequest) -> RemoteKV | None:
        kv = kv_params.parse(body.kv_transfer_params, self._config.kv_transfer, self._engine.kv_identity)
        if kv is not None and body.n > 1:
            message = "n must be 1 where prefill and decode are apart"
            raise RequestError(400, "invalid_value", message, "n")
        if isinstance(kv, RemoteDecode) and body.stream:
            message = "a prefill has nothing to stream: its answer carries kv_transfer_params"
            raise RequestError(400, "invalid_value", message, "stream")
        return kv

    def _chat_request(
        self, body: ChatCompletionRequest, request_id: str, media: list[MediaItem], kv: RemoteKV | None
    ) -> Request:
        tokens = self._tokenizer.encode_chat(body.messages, body.chat_template_kwargs)
        self._check_placeholders(tokens, media)
        limit = self._engine.max_model_len
        wanted = 1 if isinstance(kv, RemoteDecode) else body.output_limit
        # Before a list is made of it: a stored item's metadata may claim any length.
        length = len(tokens) + sum(item.num_embeds - 1 for item in media)
        if length + (wanted or 1) > limit:
            raise RequestError(
                400,
                "context_length_exceeded",
                f"the prompt has {length} tokens and {wanted or 1} more are asked for, "
                f"but the model's context is {limit}",
                "messages",
            )
        tokens, media = self._expand(tokens, media)
        positions, delta = self._family.positions(len(tokens), media)
        sampling = self._tokenizer.sampling(body, wanted or limit - len(tokens))
        return Request(
            request_id,
            tokens,
            positions,
            delta,
            media,
            sampling,
            self._tokenizer.ends(body),
            cache_salt=body.cache_salt or "",
            priority=body.priority,
            kv=kv,
        )

    @property
    def _placeholders(self) -> set[int]:
        return {self._family.placeholder_token(m) for m in self._family.modalities}

    def _check_placeholders(self, tokens: list[int], media: list[MediaItem]) -> None:
        placeholders = self._placeholders
        if sum(token in placeholders for token in tokens) != len(media):
            raise RequestError(
                400, "invalid_value", "the text holds the model's own placeholder for media", "messages"
            )

    def _expand(self, tokens: list[int], media: list[MediaItem]) -> tuple[list[int], list[MediaItem]]:
        """Repeats each placeholder once per embedding and notes where each item begins."""
        placeholders = self._placeholders
        expanded: list[int] = []
        placed: list[MediaItem] = []
        for token in tokens:
            if token in placeholders:
                item = media[len(placed)]
                placed.append(replace(item, offset=len(expanded)))
                expanded += [token] * item.num_embeds
            else:
                expanded.append(token)
        return expanded, placed

    def _check_counts(self, parts: list[tuple[str, MediaPart]]) -> None:
        counts: dict[str, int] = {}
        for param, part in parts:
            modality = modality_of(part)
            if modality not in self._family.modalities:
                raise RequestError(
                    400, "unsupported_modality", f"{param}: this model takes no {modality}", param
                )
            counts[modality] = counts.get(modality, 0) + 1
            if counts[modality] > self._config.media.limit(modality):
                limit = self._config.media.limit(modality)
                message = f"at most {limit} {modality} items are taken per request (--limit-mm-per-prompt)"
                raise RequestError(400, "too_many_media", message, param)

    async def _item(
        self, part: MediaPart, param: str, body: ChatCompletionRequest, kv: RemoteKV | None
    ) -> MediaItem:
        if isinstance(part, EmbedsPart):
            return self._stored_item(part, param, kv)
        modality = modality_of(part)
        if not self._config.has_tower:
            raise RequestError(
                400,
                "no_encoder",
                f"{param}: this instance has no encoder; send what an encoder reported ({modality}_embeds), "
                "or start it with --ec-miss compute",
                param,
            )
        data, source = await self._read(part, param)
        return await _in_pool(self._media_pool, self._raw_item, modality, data, source, body)

    async def _read(self, part: RawMediaPart, param: str) -> tuple[bytes, str]:
        """The encoded bytes of an item, and the name of the field they come from. Raises `RequestError`."""
        limits, pool = self._config.media, self._media_pool
        if isinstance(part, InputAudioPart):
            field, sound = f"{param}.input_audio", part.input_audio
            if sound.format not in FORMATS:
                known = ", ".join(FORMATS)
                raise refuse(f"{sound.format!r} is not known; known are {known}", f"{field}.format")
            field += ".data"
            return await _in_pool(pool, decode_base64, sound.data, limits, field), field
        field = f"{param}.{part.type}.url"
        return await read_source(getattr(part, part.type).url, limits, field, pool), field

    def _raw_item(self, modality: str, data: bytes, param: str, body: ChatCompletionRequest) -> MediaItem:
        self._metrics.media_decoded.labels(modality).inc()
        decoded, content = _decode(modality, data, self._config.media, param)
        options = body.mm_processor_kwargs or {}
        try:
            processed = self._family.process(modality, decoded, options)
            key = mm_hash(
                fingerprint=self._engine.fingerprint,
                modality=modality,
                options=options,
                content=content,
                salt=body.cache_salt or "",
            )
        except (MediaRefused, ValueError) as error:
            raise refuse(str(error), param) from error
        return MediaItem(modality, key, processed.num_embeds, processed.metadata, features=processed.features)

    def _stored_item(self, part: EmbedsPart, param: str, kv: RemoteKV | None) -> MediaItem:
        modality = modality_of(part)
        metadata = getattr(part, part.type)
        reads_store = self._config.ec_transfer is not None and self._config.ec_transfer.is_consumer
        if not reads_store and not isinstance(kv, RemotePrefill):
            raise RequestError(
                400, "no_ec_store", f"{param}: this instance reads no EC store; send the media itself", param
            )
        try:
            num_embeds = self._family.num_embeds(modality, metadata)
        except MediaRefused as error:
            raise refuse(str(error), f"{param}.{part.type}") from error
        return MediaItem(modality, part.uuid, num_embeds, metadata)


async def _in_pool(pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


def _decode(modality: str, data: bytes, limits: MediaLimits, param: str) -> tuple[Decoded, MediaContent]:
    """Decoded media, and what identifies it. Raises `RequestError`."""
    if modality == "audio":
        sound = decode_audio(data, limits, param)
        return sound, audio_content(sound)
    image = decode_image(data, limits, param)
    return image, image_content(image)


def modality_of(part: MediaPart) -> str:
    if isinstance(part, AudioUrlPart | InputAudioPart | AudioEmbedsPart):
        return "audio"
    return "video" if isinstance(part, VideoUrlPart | VideoEmbedsPart) else "image"
