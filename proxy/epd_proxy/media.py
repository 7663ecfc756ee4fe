"""Media items of a chat completion: found, keyed, and replaced by what the encoder knows of them.

Pure functions over the parsed body. The content part that a consumer takes is the one of the wire contract:
`{"type": "image_embeds", "image_embeds": {metadata}, "uuid": mm_hash}`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from epd_proxy.errors import BadRequest
from epd_proxy.jsonbody import Chunks, JsonBody

MODALITIES = {"image_url": "image", "audio_url": "audio", "input_audio": "audio", "video_url": "video"}

# The proxy alone makes these: a client that could would name other clients' encoder cache entries.
_INTERNAL_PARTS = frozenset({"image_embeds", "audio_embeds", "video_embeds"})
_INTERNAL_FIELDS = ("ec_transfer_params", "kv_transfer_params")

# Fields of the body that a primer carries too, because they are part of the mm_hash.
PRIMER_FIELDS = ("model", "mm_processor_kwargs", "cache_salt")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a content part stands: `messages[message].content[part]`."""

    message: int
    part: int

    def __str__(self) -> str:
        return f"messages[{self.message}].content[{self.part}]"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One media part without the client's `uuid`; `remote` when its bytes lie behind a URL.

    `named` gives it a `uuid` of ours.
    """

    place: Place
    modality: str
    part: Mapping[str, Any]
    remote: bool


@dataclass(frozen=True, slots=True)
class Primed:
    """What an encoder answered for one item: its key in the EC store, and its placeholder metadata.

    `encoder` is the URL of the one that answered.
    """

    mm_hash: str
    metadata: Mapping[str, Any]
    encoder: str = ""


@dataclass(frozen=True, slots=True)
class ChatBody:
    """What the proxy understands of a chat completion."""

    stream: bool
    items: tuple[MediaItem, ...]
    has_uuid: bool


def read_chat(doc: Any, max_items: int) -> ChatBody:
    """Media items over all messages, in order. Raises BadRequest naming the field at fault."""
    if not isinstance(doc, dict):
        raise BadRequest("the body must be a JSON object")
    _check_fields(doc)
    messages = doc.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a non-empty list", "messages")
    items: list[MediaItem] = []
    has_uuid = False
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequest("a message must be an object", f"messages[{i}]")
        content = message.get("content")
        if isinstance(content, list):
            for j, part in enumerate(content):
                item = _read_part(part, Place(i, j))
                has_uuid = has_uuid or (isinstance(part, dict) and "uuid" in part)
                if item is not None:
                    items.append(item)
        elif content is not None and not isinstance(content, str):
            raise BadRequest("content must be a string or a list of parts", f"messages[{i}].content")
    if len(items) > max_items:
        raise BadRequest(f"{len(items)} media items; at most {max_items} are allowed", "messages")
    return ChatBody(bool(doc.get("stream")), tuple(items), has_uuid)


def _check_fields(doc: Mapping[str, Any]) -> None:
    for field in _INTERNAL_FIELDS:
        if doc.get(field) is not None:
            raise BadRequest(f"{field} is internal to the deployment", field)
    wanted: dict[str, tuple[type, str]] = {
        "model": (str, "a string"),
        "stream": (bool, "true or false"),
        "mm_processor_kwargs": (dict, "an object"),
        "cache_salt": (str, "a string"),
    }
    for field, (kind, words) in wanted.items():
        if doc.get(field) is not None and not isinstance(doc[field], kind):
            raise BadRequest(f"{field} must be {words}", field)


def _read_part(part: Any, place: Place) -> MediaItem | None:
    if isinstance(part, str):
        return None
    if not isinstance(part, dict):
        raise BadRequest("a content part must be an object", str(place))
    kind = part.get("type")
    if not isinstance(kind, str):
        raise BadRequest("a content part needs a type, a string", f"{place}.type")
    if kind in _INTERNAL_PARTS:
        raise BadRequest(
            f"{kind} parts are internal to the deployment; send the media itself", f"{place}.type"
        )
    if kind not in MODALITIES:
        return None
    payload = part.get(kind)
    field = "data" if kind == "input_audio" else "url"
    if not isinstance(payload, dict):
        raise BadRequest(f"{kind} must be an object with a {field}", f"{place}.{kind}")
    source = payload.get(field)
    if not isinstance(source, str) or not source:
        raise BadRequest(f"{field} must be a non-empty string", f"{place}.{kind}.{field}")
    remote = field == "url" and not source.startswith("data:")
    return MediaItem(place, MODALITIES[kind], _without_uuid(part), remote)


def key_text(body: JsonBody, item: MediaItem) -> Chunks:
    """The text whose digest tells items apart: everything that the encoder's mm_hash can depend on.

    Canonical JSON is typed and self-delimiting, so two different items never give one text.
    """
    scope = [body.doc.get(field) for field in PRIMER_FIELDS]
    return body.render([*scope, item.modality, item.part], canonical=True)


def digest(text: Chunks) -> bytes:
    """SHA-256 of `text`. It frees the interpreter for long inputs, so long ones belong in a thread."""
    state = hashlib.sha256()
    for piece in text:
        state.update(piece)
    return state.digest()


def named(item: MediaItem, key: bytes) -> MediaItem:
    """The item with a `uuid` of ours, its key in hex: vLLM takes that for the whole key of what it caches, in
    place of a hash that knows no tenant. Not where the bytes lie behind a URL: they may change."""
    return item if item.remote else replace(item, part={**item.part, "uuid": key.hex()})


def primer_doc(doc: Mapping[str, Any], items: Sequence[MediaItem]) -> dict[str, Any]:
    """The primer request for `items`: media only, one token, the fields that enter the mm_hash, and what says
    how urgent it is."""
    fields = (*PRIMER_FIELDS, "priority")
    scope = {field: doc[field] for field in fields if doc.get(field) is not None}
    message = {"role": "user", "content": [item.part for item in items]}
    return {**scope, "messages": [message], "max_tokens": 1, "stream": False}


def rewrite(
    doc: Mapping[str, Any], items: Sequence[MediaItem], primed: Sequence[Primed]
) -> tuple[dict[str, Any], bool]:
    """The body for a PD, and whether every item in it is metadata only.

    All items of a modality are rewritten, or none: engines refuse a mixture. No client's `uuid` stays; items
    that keep their media have ours, so that an engine finds under it what the encoder has stored.
    """
    raw = {item.modality for item, known in zip(items, primed, strict=True) if not known.metadata}
    known_at = {item.place: (item, known) for item, known in zip(items, primed, strict=True)}

    def part_at(place: Place, part: Any) -> Any:
        if place in known_at:
            item, known = known_at[place]
            if item.modality not in raw:
                kind = f"{item.modality}_embeds"
                return {"type": kind, kind: known.metadata, "uuid": known.mm_hash}
            return item.part
        return _without_uuid(part)

    messages = [
        {**message, "content": [part_at(Place(i, j), part) for j, part in enumerate(message["content"])]}
        if isinstance(message.get("content"), list)
        else message
        for i, message in enumerate(doc["messages"])
    ]
    return {**doc, "messages": messages}, not raw


def _without_uuid(part: Any) -> Any:
    if isinstance(part, dict) and "uuid" in part:
        return {name: value for name, value in part.items() if name != "uuid"}
    return part
