"""What a request says of KV that crosses instances: prefill hands it on, decode takes it over."""

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from epd_engine.core.sampling import TokenLogprobs
from epd_engine.ec_store.keys import canonical_json

if TYPE_CHECKING:
    from epd_engine.core.request import Request


@dataclass(frozen=True)
class RemoteDecode:
    """This instance computes the prompt and one token; another goes on from there."""


@dataclass(frozen=True)
class RemotePrefill:
    """Another instance has computed the prompt and the first token of the answer.

    `transfer_id` is 64 hex digits that it made up; `connector` is what its connector says beside that.
    """

    engine_id: str
    transfer_id: str
    num_prompt_tokens: int
    first_token_id: int
    first_token_logprobs: TokenLogprobs | None = None
    connector: Mapping[str, Any] = field(default_factory=dict)


RemoteKV = RemoteDecode | RemotePrefill


def prompt_digest(request: "Request") -> str:
    """Of what a prompt's KV depends on beside the model: tokens, media and their places, tenant. 64 hex
    digits. Both instances make it for themselves, so that KV of another prompt is never taken."""
    media = [[m.mm_hash, m.offset, m.num_embeds, dict(m.metadata)] for m in request.media]
    digest = hashlib.sha256(array("q", request.prompt_token_ids).tobytes())
    said = canonical_json([request.num_prompt_tokens, request.cache_salt, media])
    digest.update(said.encode())
    return digest.hexdigest()
