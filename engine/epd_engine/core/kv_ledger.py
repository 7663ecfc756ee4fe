"""Requests whose KV crosses instances: what is being loaded, and what outlives its request.

- A request that loads holds its blocks until the load has ended, even when it is aborted meanwhile: nobody
  else may be given blocks that are being written.
- An answer that promises KV is given once the KV is where the next instance finds it; or, where the
  connector says that blocks must be kept, at once, and the blocks stay until they have been pulled.
"""

from dataclasses import dataclass, field, replace

from epd_engine.core.kv_blocks import BlockPool
from epd_engine.core.output import RequestUpdate, SchedulerOutput
from epd_engine.core.remote_kv import RemoteDecode, RemotePrefill
from epd_engine.core.request import Request, RequestError, RequestStatus
from epd_engine.kv_transfer.base import KVConnectorBase, KVConnectorOutput
from epd_engine.kv_transfer.params import add_logprobs


@dataclass
class KVNews:
    """Requests whose load has succeeded, or failed for a reason, and answers that waited for a save."""

    arrived: list[Request] = field(default_factory=list)
    lost: list[tuple[Request, str]] = field(default_factory=list)
    answers: list[RequestUpdate] = field(default_factory=list)


class KVLedger:
    """The scheduler's part of a KV transfer; without a connector there is nothing to keep."""

    def __init__(self, connector: KVConnectorBase | None, pool: BlockPool):
        self.connector, self._pool = connector, pool
        self._loading: dict[str, Request] = {}
        self._abandoned: dict[str, Request] = {}  # ended while they were loading
        self._kept: dict[str, list[int]] = {}  # blocks that a peer still has to pull, by request
        self._producing: set[str] = set()  # requests here that are to be handed on
        self._sent: dict[str, str | None] = {}  # which of them are saved already: None, or why it failed
        self._held: dict[str, RequestUpdate] = {}  # ends of requests that wait until their KV is saved

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def num_pending(self) -> int:
        """What the engine must not sleep over."""
        return len(self._loading) + len(self._abandoned) + len(self._held)

    @property
    def keeps_blocks(self) -> bool:
        """Whether a peer may still pull."""
        return bool(self._kept)

    def check_admissible(self, request: Request) -> None:
        """Raises `RequestError` for a request that could never be served."""
        if request.kv is not None:
            assert self.connector is not None, "params are refused where there is no connector"
            self.connector.check_request(request)

    def admit(self, request: Request) -> None:
        """`request` will be served."""
        if isinstance(request.kv, RemoteDecode):
            self._producing.add(request.request_id)

    def num_external_tokens(self, request: Request) -> int:
        """Tokens of the prompt to load beyond those computed. Raises `LookupError` where they are gone."""
        missing = request.num_prompt_tokens - request.num_computed_tokens
        if missing <= 0:
            return 0
        assert self.connector is not None
        if self.connector.get_num_new_matched_tokens(request, request.num_computed_tokens) < missing:
            raise LookupError("it was taken over once and is not kept")
        return missing

    def begin_load(self, request: Request, num_tokens: int) -> None:
        """`request` holds blocks for `num_tokens` more of its prompt."""
        assert self.connector is not None
        self.connector.update_state_after_alloc(request, num_tokens)
        request.status = RequestStatus.LOADING
        self._loading[request.request_id] = request

    def preempted(self, request: Request) -> None:
        """`request` is about to lose its blocks."""
        if request.kv is not None:
            assert self.connector is not None
            self.connector.request_preempted(request)

    def abandon(self, request: Request) -> None:
        """A loading request has ended; its blocks follow once nobody writes to them."""
        self._abandoned[request.request_id] = self._loading.pop(request.request_id)

    def plan(self, step: SchedulerOutput) -> None:
        if self.connector is not None:
            step.kv_connector_metadata = self.connector.build_connector_meta(step)

    def take_output(self, output: KVConnectorOutput) -> KVNews:
        """What the worker side did; blocks that nobody needs any more are free afterwards."""
        news = KVNews()
        if self.connector is None:
            return news
        self.connector.update_connector_output(output)
        for request_id in output.finished_recving:
            self._settle_load(request_id, None, news)
        for request_id, reason in output.failed_recving.items():
            self._settle_load(request_id, reason, news)
        for request_id in output.finished_sending:
            self._settle_send(request_id, None, news)
        for request_id, reason in output.failed_sending.items():
            self._settle_send(request_id, reason, news)
        return news

    def finish(self, request: Request, update: RequestUpdate | None) -> RequestUpdate | None:
        """`request` has ended, well with `update`, or not (None). The end as it is to be told, or None where
        it must wait. Blocks that are still needed are taken from the request."""
        if request.kv is None:
            return update
        assert self.connector is not None
        request_id, completed = request.request_id, update is not None
        keep, params = self.connector.request_finished(request, completed=completed)
        if keep:
            self._kept[request_id] = list(request.block_ids)
            request.block_ids.clear()
        self._producing.discard(request_id)
        is_sent, failure = request_id in self._sent, self._sent.pop(request_id, None)
        if update is None or not isinstance(request.kv, RemoteDecode):
            return update
        if params is not None and update.logprobs:
            add_logprobs(params, update.logprobs[0])
        update = replace(update, kv_transfer_params=params)
        if keep or is_sent:
            return self._told(update, failure)
        self._held[request_id] = update
        return None

    def abort(self, request_id: str) -> None:
        """The client of an answer that waits has gone."""
        if self._held.pop(request_id, None) is not None:
            assert self.connector is not None
            self.connector.discard(request_id)

    def problems(self) -> list[str]:
        """What does not add up when there are no requests. Blocks kept for a peer are no leak."""
        open_transfers = {
            "loading": list(self._loading),
            "abandoned": list(self._abandoned),
            "unanswered": list(self._held),
            "begun": list(self._producing),
        }
        return [f"{name} KV transfers {of[:4]} are nobody's" for name, of in open_transfers.items() if of]

    @property
    def kept_blocks(self) -> set[int]:
        """Blocks that no request holds, but a peer may still pull."""
        return {block for blocks in self._kept.values() for block in blocks}

    def _settle_load(self, request_id: str, reason: str | None, news: KVNews) -> None:
        if (request := self._abandoned.pop(request_id, None)) is not None:
            self._pool.release(request.block_ids)
            assert self.connector is not None
            self.connector.request_finished(request, completed=False)
        elif (request := self._loading.pop(request_id, None)) is not None:
            if reason is None:
                news.arrived.append(request)
            else:
                news.lost.append((request, reason))

    def _settle_send(self, request_id: str, reason: str | None, news: KVNews) -> None:
        if (blocks := self._kept.pop(request_id, None)) is not None:
            self._pool.release(blocks)
        elif (update := self._held.pop(request_id, None)) is not None:
            news.answers.append(self._told(update, reason))
        elif request_id in self._producing:
            self._sent[request_id] = reason

    def _told(self, update: RequestUpdate, failure: str | None) -> RequestUpdate:
        if failure is None:
            return update
        assert self.connector is not None
        self.connector.discard(update.request_id)
        error = RequestError(503, "kv_store_unavailable", f"the prompt's KV cannot be handed on: {failure}")
        return RequestUpdate(update.request_id, error=error)


def comes_from_outside(request: Request) -> bool:
    """Whether another instance has computed its prompt."""
    return isinstance(request.kv, RemotePrefill)
