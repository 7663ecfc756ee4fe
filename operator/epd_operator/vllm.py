"""What `vllm serve` is told beside its transfers, in pods and under `epd up` alike.

The one place that has vLLM's own names, so the one to look at when a new version of it comes.
"""

from .api import Role
from .roles import RoleTraits

OLDEST, NEWEST = "0.31", "0.32"
"""The versions that these tables were read against; the connector says at start what it supports."""

SIDE_CHANNEL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
SIDE_CHANNEL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""Where an instance tells its peers of its KV; each instance of one machine needs a port of its own."""
DEFAULT_SIDE_CHANNEL_PORT = 5600

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # Threads are bound to cores one by one otherwise, whichever of them the process may use.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""What every instance gets. The second one has a meaning on CPUs only."""

OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""For a model that lies in a directory: without it vLLM asks the hub about it all the same."""


def serve_arguments(traits: RoleTraits, role: Role) -> list[str]:
    """A role's flags, each of which all versions from `OLDEST` on have."""
    # Without a timeout SIGTERM aborts what is in flight.
    flags = ["--shutdown-timeout", str(role.drain_seconds), "--enable-request-id-headers"]
    if traits.reads_media:
        flags.append("--enable-mm-embeds")
    else:
        # It has no KV to size; without this it encodes the largest picture and video there are at start.
        flags.append("--skip-mm-profiling")
    return flags
