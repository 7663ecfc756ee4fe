"""The prefill stage: one request to a prefill instance, and what it hands over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from epd_proxy.answers import Missed, refusal
from epd_proxy.config import Limits
from epd_proxy.errors import ProxyError
from epd_proxy.jsonbody import Chunks
from epd_proxy.language import ChatCall
from epd_proxy.pool import Instance
from epd_proxy.upstream import Failed, Role, call_headers

_ASKS_FOR_KV = {"do_remote_decode": True}
_ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What `instance` hands over. `params` is None where the answer ended with its first token."""

    instance: Instance
    params: Mapping[str, Any] | None


class Prefills:
    """Requests to the instances of the prefill role."""

    def __init__(self, role: Role, limits: Limits) -> None:
        self.role = role
        self._limit = limits.prefill

    async def run(self, call: ChatCall, avoid: Collection[Instance]) -> Prefilled:
        """Prefill on an instance, or on another one after it; one to `avoid` only where there is no other.

        Raises Missed when an entry of the EC store was missing, EngineAnswer with an instance's own error, or
        ProxyError.
        """
        body = call.render(prefill_doc(call.doc))

        async def attempt(instance: Instance, _: bool) -> Prefilled:
            return await self._attempt(call, body, instance)

        lease = self.role.lease(avoid=avoid)
        try:
            return await self.role.call(lease, call.request_id, attempt, avoid)
        finally:
            lease.release()

    async def _attempt(self, call: ChatCall, body: Chunks, instance: Instance) -> Prefilled:
        headers = call_headers(call.request_id, call.authorization)
        try:
            answer = await self.role.post(instance, headers, body, self._limit, "prefill")
        except Failed as failure:
            raise self._means(call, instance, failure) from failure
        if answer.status >= 400:
            raise refusal(answer, call.metadata_only)
        try:
            return Prefilled(instance, read_prefill_answer(answer.body))
        except ValueError as error:
            message = f"prefill {instance.origin.url} gave a malformed answer: {error}"
            raise Failed(
                ProxyError(502, message, code="bad_prefill_answer"), "malformed", sent=True
            ) from None

    def _means(self, call: ChatCall, instance: Instance, failure: Failed) -> Exception:
        """What a broken exchange means for the request, of which the client has seen nothing."""
        if failure.kind == "timeout":
            # Not repeated: the prompt may just be long.
            self.role.report(instance, failure, call.request_id)
            return failure.final
        if failure.kind != "disconnected":
            return failure
        if call.metadata_only:
            self.role.report(instance, failure, call.request_id)
            return Missed(str(failure.final))  # vLLM dies of one
        final = ProxyError(503, str(failure.final), code="upstream_disconnected", retry_after=1)
        return Failed(final, failure.kind, failure.sent)


def prefill_doc(doc: Mapping[str, Any]) -> dict[str, Any]:
    """The request for a prefill instance: one token, not streamed, and the KV is kept for another one."""
    asked = {name: value for name, value in doc.items() if name != "stream_options"} | _ONE_TOKEN
    if isinstance(least := doc.get("min_tokens"), int) and least > 1:
        asked["min_tokens"] = 1
    return asked | {"kv_transfer_params": _ASKS_FOR_KV}


def decode_doc(doc: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The request for a decode instance: the client's, with what the prefill instance has answered."""
    return {**doc, "kv_transfer_params": params}


def read_prefill_answer(body: bytes) -> Mapping[str, Any] | None:
    """The `kv_transfer_params` of an answer; None where it needs no decode instance, since its first token
    was its last. Raises ValueError for anything else."""
    document = orjson.loads(body)
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    params = document.get("kv_transfer_params")
    if isinstance(params, dict) and params:
        return params
    if params:
        raise ValueError("kv_transfer_params is no object")
    if _ended_by_itself(document):
        return None
    raise ValueError("no kv_transfer_params")


def _ended_by_itself(document: Mapping[str, Any]) -> bool:
    try:
        return document["choices"][0]["finish_reason"] not in (None, "length")
    except (LookupError, TypeError):
        return False
