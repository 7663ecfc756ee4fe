"""Prefill on one instance, decode on another: how the KV gets from the one to the other, or is made again."""

from __future__ import annotations

from epd_proxy import logs
from epd_proxy.answers import AnswerCall, Answers, Missed, Opened
from epd_proxy.config import Limits
from epd_proxy.errors import BadRequest, KvIncompatible, KvMiss, ProxyError, Unavailable
from epd_proxy.language import ChatCall
from epd_proxy.metrics import Metrics
from epd_proxy.pairs import Pairs
from epd_proxy.pool import Instance
from epd_proxy.prefills import Prefilled, Prefills, decode_doc
from epd_proxy.upstream import Failed, Role


class Handover:
    """The language model as two roles, whose instances are chosen independently of each other."""

    def __init__(self, prefill: Role, decode: Role, limits: Limits, metrics: Metrics) -> None:
        self.roles = (prefill, decode)
        self._metrics = metrics
        self._prefills = Prefills(prefill, limits)
        self._decodes = Answers(decode, limits.decode, limits.answer)
        self._without_decode = Answers(prefill, limits.first_token, limits.answer)
        self._pairs = Pairs()

    async def open(self, call: ChatCall) -> Opened:
        """As `Language.open`. A handover that fails is done once more from its beginning, with nothing of the
        first one in it, and by other instances where there are some."""
        prefill, decode = self.roles
        if isinstance(number := call.doc.get("n"), int | float) and number > 1:
            raise BadRequest("n must be 1 where prefill and decode are apart", "n")
        failed: set[Instance] = set()
        final: ProxyError | None = None
        for again in (False, True):
            if not decode.pool.ready():
                raise Unavailable(decode.name, "is ready")  # before a prefill is wasted
            hopeless = self._pairs.hopeless(prefill.pool.ready(), decode.pool.ready())
            prefilled = await self._prefill(call, failed | hopeless)
            if prefilled.params is None:
                # It ended with its first token, and a prefill instance can say that by itself.
                return await self._without_decode.open(call.unchanged())
            try:
                return await self._decode(call, prefilled, decode_doc(call.doc, prefilled.params), failed)
            except Missed as missed:
                final = KvMiss(str(missed))
                if missed.instance is not None:
                    failed.add(missed.instance)
            except KvIncompatible as error:
                final = error
            failed.add(prefilled.instance)
            logs.warning(
                final.code, request_id=call.request_id, again=again, reason=final.message, **call.trail.facts
            )
            if not again:
                self._metrics.reprefills.inc()
        assert final is not None
        raise final

    async def _prefill(self, call: ChatCall, avoid: set[Instance]) -> Prefilled:
        call.trail.stage = "prefill"
        with self._metrics.prefill_seconds.time():
            prefilled = await self._prefills.run(call, avoid)
        call.trail.facts["prefill"] = prefilled.instance.origin.url
        return prefilled

    async def _decode(
        self, call: ChatCall, prefilled: Prefilled, doc: dict[str, object], avoid: set[Instance]
    ) -> Opened:
        call.trail.stage = "decode"
        asked = AnswerCall(call.render(doc), call.request_id, call.authorization, call.stream, may_miss=True)

        def heard(instance: Instance, failure: Failed) -> None:
            if isinstance(failure.final, KvIncompatible):
                self._pairs.refused(prefilled.instance, instance)

        return await self._decodes.open(asked, avoid | self._pairs.unfit(prefilled.instance), heard)
