"""Observe, render, diff, apply, prune, status: one resource at a time, from whatever state it is in."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from ..api import EPDDeployment
from ..api.status import Condition
from ..apply.api import Api
from ..apply.children import Children
from ..apply.kinds import AUTOSCALER, CLAIM, DEPLOYMENT, POD, RESOURCE, Kind, child_kinds
from ..apply.ownership import Owner
from ..apply.plan import Ref, is_ending, plan
from ..apply.rollout import Held, stage
from ..render import RenderContext, RenderError, claim_names
from ..status.compute import Observed, compute_status, previous_conditions
from ..status.events import notes
from ..status.load import Load
from ..status.parts import Problem
from ..status.usage import Usage
from .cache import Cache, Key, nobodys
from .reading import INVALID, RefusedError, read
from .recorder import Recorder
from .rendered import Renderings

Object = dict[str, Any]
log = logging.getLogger(__name__)


class Result(StrEnum):
    """How a reconcile ended."""

    OK = "ok"
    """Nothing is left to do until something changes."""
    REFUSED = "refused"
    """The spec must change."""
    FAILED = "failed"
    """To be tried again."""


@dataclass(frozen=True)
class _Wish:
    """What a resource asks for."""

    deployment: EPDDeployment | None
    manifests: list[Object]
    problems: list[Problem]


class Reconciler:
    """Brings resources to what they say. Raises ApiError where a resource's own status cannot be read or
    written."""

    def __init__(
        self,
        cache: Cache,
        api: Api,
        context: RenderContext,
        usage: Callable[[Key], Usage | None] = lambda _: None,
        loads: Callable[[Key], Mapping[str, Load] | None] = lambda _: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cache = cache
        self._api = api
        self._renderings = Renderings(context)
        self._usage = usage
        self._loads = loads
        self._now = now
        self._kinds: dict[str, Kind] = {kind.kind: kind for kind in child_kinds(context.versions)}
        self._children = Children(api, self._kinds.values())
        self._recorder = Recorder(api)

    async def reconcile(self, key: Key) -> Result:
        """Looks at one resource and does what is needed."""
        resource = self._cache.resource(key)
        if resource is None or is_ending(resource):
            # What it made names it as the owner: the API server collects it.
            self._renderings.forget(key)
            return Result.OK
        children = self._cache.children(key)
        wish = self._wish(key, resource, children)
        problems = list(wish.problems)
        held: dict[str, Held] = {}
        if wish.deployment is not None and not wish.deployment.spec.paused:
            owner = Owner(key.name, resource["metadata"]["uid"])
            current = stage(wish.manifests, children)
            held = current.held
            steps = plan(current.desired, children, owner, self._kinds, current.kept)
            outcome = await self._children.carry_out(steps, children, owner)
            for written in outcome.written:
                self._cache.put(self._kinds[written["kind"]], written)
            problems += outcome.problems
            if not steps.is_empty:
                children = self._cache.children(key)
            if outcome.written:
                log.info("children written", extra={"resource": str(key), "count": len(outcome.written)})
            for problem in outcome.problems:
                log.warning(problem.message, extra={"resource": str(key), "reason": problem.reason})
        await self._report(key, resource, children, wish.deployment, problems, held)
        if wish.problems:
            return Result.REFUSED
        return Result.FAILED if problems else Result.OK

    def _wish(self, key: Key, resource: Object, children: dict[Ref, Object]) -> _Wish:
        try:
            deployment = read(resource, children)
            return _Wish(deployment, self._renderings.manifests(key, deployment), [])
        except RefusedError as refused:
            return _Wish(None, [], [Problem(refused.reason, line) for line in refused.lines])
        except RenderError as error:
            return _Wish(None, [], [Problem(INVALID, str(error))])

    async def _report(
        self,
        key: Key,
        resource: Object,
        children: dict[Ref, Object],
        deployment: EPDDeployment | None,
        problems: list[Problem],
        held: dict[str, Held],
    ) -> None:
        claims = {ref.name: found for ref, found in children.items() if ref.kind == CLAIM.kind}
        if deployment is not None:
            claims |= await self._others_claims(deployment, key, claims)
        observed = Observed(
            resource=resource,
            deployment=deployment,
            problems=problems,
            held=held,
            deployments=[found for ref, found in children.items() if ref.kind == DEPLOYMENT.kind],
            pods=[found for ref, found in children.items() if ref.kind == POD.kind],
            claims=claims,
            usage=self._usage(key),
            loads=self._loads(key),
            scalers=self._cache.of_kind(nobodys(key.namespace), self._kinds[AUTOSCALER]),
        )
        now = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        status = compute_status(observed, now)
        if status == resource.get("status", {}):
            return
        metadata = {"name": key.name, "namespace": key.namespace, "uid": resource["metadata"]["uid"]}
        manifest = {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.kind,
            "metadata": metadata,
            "status": status,
        }
        self._cache.put(RESOURCE, await self._api.apply(f"{RESOURCE.path(*key)}/status", manifest))
        after = [Condition.model_validate(one) for one in status["conditions"]]
        for note in notes(previous_conditions(resource), after):
            await self._recorder.tell(resource, note, now)

    async def _others_claims(
        self, deployment: EPDDeployment, key: Key, known: dict[str, Object]
    ) -> dict[str, Object]:
        """Claims that exist without us; they are not watched."""
        found = {}
        for name in claim_names(deployment).values():
            if name not in known:
                claim = await self._api.get(CLAIM.path(key.namespace, name))
                if claim is not None:
                    found[name] = claim
        return found
