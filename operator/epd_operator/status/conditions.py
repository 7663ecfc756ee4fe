"""Conditions of the whole: Ready, Progressing, Degraded, StoreReady and one for each role."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..api.status import Condition
from .parts import PartState, Problem

STORE = "store"
_TYPES = {
    "encoder": "EncoderReady",
    "pd": "PDReady",
    "prefill": "PrefillReady",
    "decode": "DecodeReady",
    "proxy": "ProxyReady",
    STORE: "StoreReady",
}
_MESSAGE_LENGTH = 4096
SERVING = "Serving"
PAUSED = "Paused"


@dataclass(frozen=True)
class Verdict:
    """One condition without its times."""

    type: str
    status: bool
    reason: str
    message: str


def verdicts(
    parts: Mapping[str, PartState], problems: Sequence[Problem], *, paused: bool, endpoint: str | None
) -> list[Verdict]:
    """All conditions. `problems` are of the whole: a spec that is refused, children that cannot be made."""
    return [
        _ready(parts, problems, endpoint),
        _progressing(parts, problems, paused),
        _degraded(parts, problems),
        *(Verdict(_TYPES[name], part.ready, part.reason, part.message) for name, part in parts.items()),
    ]


def _ready(parts: Mapping[str, PartState], problems: Sequence[Problem], endpoint: str | None) -> Verdict:
    if problems:
        return Verdict("Ready", False, problems[0].reason, _lines(problems))
    lacking = [(name, part) for name, part in parts.items() if not part.ready]
    if not lacking:
        where = f" at {endpoint}" if endpoint else ""
        return Verdict("Ready", True, SERVING, f"everything is ready{where}")
    # What needs somebody is said before what needs time.
    lacking.sort(key=lambda one: not one[1].is_problem)
    message = "\n".join(f"{name}: {part.message}" for name, part in lacking)
    return Verdict("Ready", False, lacking[0][1].reason, message)


def _progressing(parts: Mapping[str, PartState], problems: Sequence[Problem], paused: bool) -> Verdict:
    if paused:
        return Verdict("Progressing", False, PAUSED, "spec.paused is true: the children stay as they are")
    if problems:
        return Verdict("Progressing", False, problems[0].reason, "the children stay as they are")
    moving = [(name, part) for name, part in parts.items() if part.in_progress]
    if not moving:
        return Verdict("Progressing", False, "Settled", "nothing is under way")
    message = "\n".join(f"{name}: {part.message}" for name, part in moving)
    return Verdict("Progressing", True, moving[0][1].reason, message)


def _degraded(parts: Mapping[str, PartState], problems: Sequence[Problem]) -> Verdict:
    found = [
        *problems,
        *(Problem(part.reason, f"{name}: {part.message}") for name, part in parts.items() if part.is_problem),
    ]
    if not found:
        return Verdict("Degraded", False, "AsExpected", "nothing needs attention")
    return Verdict("Degraded", True, found[0].reason, _lines(found))


def _lines(problems: Iterable[Problem]) -> str:
    return "\n".join(problem.message for problem in problems)


def with_times(
    found: Iterable[Verdict], previous: Iterable[Condition], generation: int, now: str
) -> Iterator[Condition]:
    """Conditions that know since when they hold."""
    before = {one.type: one for one in previous}
    for verdict in found:
        status, last = "True" if verdict.status else "False", before.get(verdict.type)
        same = last is not None and last.status == status
        yield Condition.model_validate(
            {
                "type": verdict.type,
                "status": status,
                "reason": verdict.reason,
                "message": _shortened(verdict.message),
                "observedGeneration": generation,
                "lastTransitionTime": last.last_transition_time if same and last is not None else now,
            }
        )


def _shortened(message: str) -> str:
    return message if len(message) <= _MESSAGE_LENGTH else message[: _MESSAGE_LENGTH - 3] + "..."
