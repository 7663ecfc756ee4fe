"""`kv_transfer_params`: what proxy, prefill and decode say to one another, by vLLM's names if any.

The proxy sends `{"do_remote_decode": true}` to prefill, and what prefill answers to decode as it is.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epd_engine.core.remote_kv import RemoteDecode, RemoteKV, RemotePrefill
from epd_engine.core.request import Request, RequestError
from epd_engine.core.sampling import TokenLogprobs
from epd_engine.kv_transfer.base import KVModelIdentity
from epd_engine.kv_transfer.config import KVTransferConfig

FIELD = "kv_transfer_params"
LEAST_LOGPROB = -9999.0  # JSON knows no infinity

Real = Annotated[float, Field(allow_inf_nan=False)]


class _Logprobs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    chosen: Real
    top: list[tuple[int, Real]] = Field(max_length=64)


class _Prefilled(BaseModel):
    """The answer of a prefill instance."""

    model_config = ConfigDict(extra="forbid")

    do_remote_prefill: Literal[True]
    do_remote_decode: Literal[False] = False
    remote_engine_id: str = Field(max_length=128)
    remote_request_id: str = Field(pattern=r"^[0-9a-f]{64}$")
    num_prompt_tokens: int = Field(ge=1, lt=2**31)
    first_token_id: int = Field(ge=0, lt=2**31)
    first_token_logprobs: _Logprobs | None = None
    compatibility: dict[str, str | int] = Field(max_length=32)
    connector: dict[str, Any] = Field(max_length=16)


def parse(
    said: Mapping[str, Any] | None, config: KVTransferConfig | None, identity: KVModelIdentity | None
) -> RemoteKV | None:
    """What a request's params ask of this instance. Raises `RequestError`: 400 for what this instance does
    not do or cannot read, 409 `kv_incompatible` for KV of another model or form."""
    asked = {key: value for key, value in (said or {}).items() if value is not None}
    if not asked.get("do_remote_decode") and not asked.get("do_remote_prefill"):
        if set(asked) - {"do_remote_decode", "do_remote_prefill"}:
            raise _refused("one of do_remote_decode and do_remote_prefill must be true")
        return None
    if asked.get("do_remote_decode"):
        if config is None or not config.is_producer:
            raise _refused("this instance hands no KV on (--kv-transfer-config with kv_role kv_producer)")
        if extra := [k for k, v in asked.items() if k != "do_remote_decode" and v is not False]:
            raise _refused(f"{extra[0]!r} does not go with do_remote_decode")
        return RemoteDecode()
    if config is None or identity is None or not config.is_consumer:
        raise _refused("this instance takes no KV over (--kv-transfer-config with kv_role kv_consumer)")
    return _prefilled(asked, identity)


def _prefilled(asked: Mapping[str, Any], identity: KVModelIdentity) -> RemotePrefill:
    try:
        params = _Prefilled.model_validate(asked)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise _refused(f"{path}: {first['msg']}") from error
    if difference := identity.difference(params.compatibility):
        raise incompatible(difference)
    if params.first_token_id >= identity.vocab_size:
        raise _refused(f"first_token_id: the model has {identity.vocab_size} tokens")
    logprobs = params.first_token_logprobs
    return RemotePrefill(
        engine_id=params.remote_engine_id,
        transfer_id=params.remote_request_id,
        num_prompt_tokens=params.num_prompt_tokens,
        first_token_id=params.first_token_id,
        first_token_logprobs=(
            None if logprobs is None else TokenLogprobs(logprobs.chosen, tuple(logprobs.top))
        ),
        connector=params.connector,
    )


def prefilled(
    identity: KVModelIdentity,
    *,
    engine_id: str,
    transfer_id: str,
    num_prompt_tokens: int,
    first_token_id: int,
    connector: Mapping[str, Any],
) -> dict[str, Any]:
    """What prefill answers; `add_logprobs` completes it."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": transfer_id,
        "num_prompt_tokens": num_prompt_tokens,
        "first_token_id": first_token_id,
        "first_token_logprobs": None,
        "compatibility": identity.compatibility,
        "connector": dict(connector),
    }


def add_logprobs(params: dict[str, Any], said: TokenLogprobs) -> None:
    params["first_token_logprobs"] = {
        "chosen": max(said.chosen, LEAST_LOGPROB),
        "top": [[token, max(value, LEAST_LOGPROB)] for token, value in said.top],
    }


def check_prompt_length(request: Request, kv: RemotePrefill) -> None:
    """Raises `RequestError` where the two instances do not mean the same prompt."""
    if kv.num_prompt_tokens != request.num_prompt_tokens:
        raise incompatible(
            f"its prompt has {kv.num_prompt_tokens} tokens, and {request.num_prompt_tokens} here"
        )


def incompatible(reason: str) -> RequestError:
    """Not to be retried with these two instances."""
    return RequestError(409, "kv_incompatible", f"the prefill instance's KV does not fit: {reason}", FIELD)


def missing(reason: str) -> RequestError:
    """Retryable: the prompt can be computed again and the request sent anew."""
    return RequestError(503, "kv_miss", f"the prompt's KV cannot be had ({reason}); prefill again and retry")


def _refused(message: str) -> RequestError:
    return RequestError(400, "invalid_value", f"{FIELD}: {message}", FIELD)
