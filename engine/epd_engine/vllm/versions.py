"""Which vLLM this connector fits."""

from typing import Any

OLDEST = (0, 31)
NEWEST = (0, 33)
"""The newest whose connector interface has been read; a later one gets a warning."""

# What keeps a miss from ending the engine. vLLM before 0.31 lacks some of it.
NEEDED = ("ensure_cache_available", "take_unavailable_requests", "start_save_caches", "build_prom_metrics")


class UnsupportedVllm(RuntimeError):
    """This vLLM cannot run the connector safely; the message says which can."""


def check_version(version: str, base: type[Any]) -> str | None:
    """A warning for a version that nobody has tried, else None. `base` is vLLM's `ECConnectorBase`.

    Raises `UnsupportedVllm`.
    """
    supported = f"supported are {_text(OLDEST)} to {_text(NEWEST)}"
    if absent := [name for name in NEEDED if not hasattr(base, name)]:
        raise UnsupportedVllm(f"vLLM {version} has no ECConnectorBase.{absent[0]}; {supported}")
    release = _release(version)
    if release is None:
        return f"vLLM {version} is no release; {supported}"
    if release < OLDEST:
        raise UnsupportedVllm(f"vLLM {version} is too old for this EC connector; {supported}")
    if release > NEWEST:
        return f"vLLM {version} is newer than what this EC connector was made for; {supported}"
    return None


def _release(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    release = int(parts[0]), int(parts[1])
    return None if release == (0, 0) or "dev" in version else release


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
