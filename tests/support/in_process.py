"""An engine within the test's own process, driven step by step: the server's way in, without its HTTP."""

import asyncio
import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epd_engine.config import EngineConfig
from epd_engine.core.request import Request
from epd_engine.core.sampling import TokenLogprobs
from epd_engine.ec_transfer.config import ECTransferConfig
from epd_engine.engine import Engine
from epd_engine.server.metrics import ServerMetrics
from epd_engine.server.prompt import PromptBuilder
from epd_engine.server.protocol import ChatCompletionRequest
from epd_engine.server.text import ChatTokenizer

MOST_STEPS = 200_000  # a request that never ends is a failure, not a hang


@dataclass
class Answered:
    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ec_transfer_params: Mapping[str, Any] | None = None


class InProcess:
    """`preemptions` counts how often a request lost its place."""

    def __init__(self, model: Path, *, role: str | None = None, store: Path | None = None, **config: Any):
        transfer = None
        if role is not None:
            extra = {"shared_storage_path": str(store)}
            transfer = ECTransferConfig(
                "ECSharedStorageConnector",
                role,  # type: ignore[arg-type]
                ec_connector_extra_config=extra,
            )
        self.engine = Engine(EngineConfig(str(model), ec_transfer=transfer, **config))
        self.engine.smoke()
        tokenizer = ChatTokenizer(self.engine.family.checkpoint)
        self._builder = PromptBuilder(self.engine, tokenizer, ServerMetrics(), nullcontext)
        self.preemptions = 0

    def build(self, bodies: Sequence[dict[str, Any]]) -> list[Request]:
        """What the server would make of these bodies."""

        async def all_of_them() -> list[Request]:
            made = [ChatCompletionRequest.model_validate({"model": "m", **body}) for body in bodies]
            return [await self._builder.build(body, f"request-{n}") for n, body in enumerate(made)]

        return asyncio.run(all_of_them())

    def ask(self, conversations: Sequence[list[dict[str, Any]]], **fields: Any) -> list[Answered]:
        """All at once, greedily."""
        bodies = [{"messages": messages, "temperature": 0, **fields} for messages in conversations]
        return self.run(self.build(bodies))

    def run(self, requests: Sequence[Request]) -> list[Answered]:
        """Adds all, then steps until all have ended; their books must balance afterwards."""
        answers = {request.request_id: Answered(request) for request in requests}
        for request in requests:
            self.engine.add(request)
        for _ in range(MOST_STEPS):
            if not self.engine.has_work:
                break
            waiting = self.engine.scheduler.num_waiting
            updates = self.engine.step()
            self.preemptions += self.engine.scheduler.num_waiting > waiting
            for update in updates:
                assert update.error is None, f"{update.request_id}: {update.error}"
                answer = answers[update.request_id]
                answer.ids += update.new_token_ids
                answer.logprobs += update.logprobs
                answer.ec_transfer_params = update.ec_transfer_params
        assert not self.engine.has_work, f"not done after {MOST_STEPS} steps"
        assert self.engine.scheduler.problems() == []
        return [answers[request.request_id] for request in requests]

    def close(self) -> None:
        self._builder.shutdown()
        self.engine.shutdown()


def through(encoder: InProcess, conversations: Sequence[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The same chats for a PD, once `encoder` has published their pictures."""
    out = copy.deepcopy(list(conversations))
    for messages in out:
        lists = [m["content"] for m in messages if isinstance(m["content"], list)]
        places = [(parts, n) for parts in lists for n, p in enumerate(parts) if p["type"] != "text"]
        if not places:
            continue
        primer = {"role": "user", "content": [parts[n] for parts, n in places]}
        (answer,) = encoder.ask([[primer]], max_tokens=1)
        assert answer.ec_transfer_params is not None
        for key, said in answer.ec_transfer_params.items():
            for index in said["item_indices"]:
                parts, n = places[index]
                parts[n] = {"type": "image_embeds", "image_embeds": said["metadata"], "uuid": key}
    return out
