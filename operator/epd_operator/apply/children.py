"""Carrying out a plan at the API server."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..status.parts import Problem
from .api import Api, ApiError
from .diff import REPLICAS_MANAGER
from .kinds import SCALERS, Kind
from .ownership import Owner, Ownership, ownership
from .plan import Plan, Ref, collision, ref_of

Object = dict[str, Any]

NAME_TAKEN = "NameTaken"
APPLY_FAILED = "ApplyFailed"
# They make pods and replicas, for which all else must be there.
_LAST = SCALERS | {"Deployment"}


@dataclass
class Outcome:
    """What became of a plan."""

    written: list[Object] = field(default_factory=list)
    """Objects as they are after they were written, or were found."""
    problems: list[Problem] = field(default_factory=list)


class Children:
    """Writes the children of resources. Problems are part of the outcome; nothing is raised for them."""

    def __init__(self, api: Api, kinds: Iterable[Kind]) -> None:
        self._api = api
        self._kinds = {kind.kind: kind for kind in kinds}

    async def carry_out(self, plan: Plan, known: Mapping[Ref, Object], owner: Owner) -> Outcome:
        """Makes, changes and deletes what the plan says; `known` are the children that were planned with."""
        outcome = Outcome(problems=[Problem(NAME_TAKEN, words) for words in plan.refused])
        # Who may no longer scale ends before somebody else begins to.
        scalers = [found for found in plan.delete if found["kind"] in SCALERS]
        await asyncio.gather(*(self._delete(found, outcome) for found in scalers))
        kept_back = await self._hand_over(plan.hand_over, outcome)
        writable = [manifest for manifest in plan.apply if ref_of(manifest) not in kept_back]
        for last in (False, True):
            wave = [manifest for manifest in writable if (manifest["kind"] in _LAST) is last]
            await asyncio.gather(
                *(self._write(manifest, ref_of(manifest) in known, owner, outcome) for manifest in wave)
            )
        others = [found for found in plan.delete if found["kind"] not in SCALERS]
        await asyncio.gather(*(self._delete(found, outcome) for found in others))
        return outcome

    def _path(self, manifest: Mapping[str, Any]) -> str:
        metadata = manifest["metadata"]
        return self._kinds[manifest["kind"]].path(metadata["namespace"], metadata["name"])

    async def _hand_over(self, deployments: Iterable[Object], outcome: Outcome) -> set[Ref]:
        """Lets another field manager hold the replicas that we are about to let go: a field that its only
        owner drops falls back to its default. Returns the Deployments with which that did not work."""
        failed = set()
        for found in deployments:
            metadata = found["metadata"]
            manifest = {
                "apiVersion": found["apiVersion"],
                "kind": found["kind"],
                "metadata": {
                    "name": metadata["name"],
                    "namespace": metadata["namespace"],
                    # Refused if somebody scaled it since we looked.
                    "resourceVersion": metadata["resourceVersion"],
                },
                "spec": {"replicas": found["spec"]["replicas"]},
            }
            try:
                await self._api.apply(self._path(found), manifest, manager=REPLICAS_MANAGER)
            except ApiError as error:
                failed.add(ref_of(found))
                outcome.problems.append(_failure(found, error))
        return failed

    async def _write(self, manifest: Object, is_known: bool, owner: Owner, outcome: Outcome) -> None:
        path = self._path(manifest)
        try:
            if not is_known:
                # Only what bears our labels is watched, so somebody else's object is found just now.
                found = await self._api.get(path)
                if found is not None and ownership(found, owner) is Ownership.FOREIGN:
                    found |= {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"]}
                    outcome.problems.append(Problem(NAME_TAKEN, collision(found)))
                    return
                is_known = found is not None
            # One that appeared since is not taken over either.
            outcome.written.append(await self._api.apply(path, manifest, force=is_known))
        except ApiError as error:
            outcome.problems.append(_failure(manifest, error))

    async def _delete(self, found: Mapping[str, Any], outcome: Outcome) -> None:
        try:
            await self._api.delete(self._path(found), found["metadata"]["uid"])
        except ApiError as error:
            outcome.problems.append(_failure(found, error))


def _failure(manifest: Mapping[str, Any], error: ApiError) -> Problem:
    return Problem(APPLY_FAILED, f"{ref_of(manifest)}: {error}")
