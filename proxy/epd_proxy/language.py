"""What runs the language model, as a request sees it: PDs alone, or prefill and decode apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from epd_proxy.answers import AnswerCall, Answers, Opened
from epd_proxy.config import Limits
from epd_proxy.errors import BadRequest
from epd_proxy.jsonbody import Chunks, JsonBody
from epd_proxy.upstream import Role


@dataclass
class Trail:
    """How far a request came, for its log line: `stage` is where it is, or where it ended."""

    stage: str = "proxy"
    facts: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One chat completion for the language model.

    `doc` is made of parts of `body`; `raw` are the client's bytes where they say the same. `metadata_only`:
    all its media are keys of the EC store.
    """

    body: JsonBody
    doc: Mapping[str, Any]
    raw: bytes | None
    stream: bool
    metadata_only: bool
    request_id: str
    authorization: bytes | None
    trail: Trail

    def unchanged(self) -> AnswerCall:
        """The request as it is. Raises BadRequest."""
        body: Chunks = self.render(self.doc) if self.raw is None else [self.raw]
        return AnswerCall(body, self.request_id, self.authorization, self.stream, self.metadata_only)

    def render(self, doc: Mapping[str, Any]) -> Chunks:
        """A document made of `doc` as JSON. Raises BadRequest."""
        try:
            return self.body.render(doc)
        except ValueError as error:
            raise BadRequest(f"the body cannot be passed on: {error}", code="invalid_json") from None


class Language(Protocol):
    """Opens answers of the language model."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that each request goes through, in order; the last one answers."""

    async def open(self, call: ChatCall) -> Opened:
        """Run the request until its answer has begun.

        Raises Missed when an entry of the EC store was missing, EngineAnswer with an engine's own error, or
        ProxyError.
        """


class Pds:
    """Prefill and decode in one instance."""

    def __init__(self, role: Role, limits: Limits) -> None:
        self.roles = (role,)
        self._answers = Answers(role, limits.first_token, limits.answer)

    async def open(self, call: ChatCall) -> Opened:
        call.trail.stage = "pd"
        return await self._answers.open(call.unchanged())
