"""What the suites build once and keep in the user's cache: minutes on a new machine, nothing after that.

    .venv/bin/python -m tests.prepare

Done before they run, so that two lanes of suites do not wait for one another's builds within a test's time.
"""

from functools import partial

from tests.cluster import providers
from tests.cluster.command import Unavailable
from tests.support.vllm import nixl_packages, vllm_python

PARTS = {
    "Kubernetes": partial(providers.prepare, with_node=True),
    "vLLM": vllm_python,
    "NIXL for vLLM": nixl_packages,
}


def main() -> None:
    for name, make in PARTS.items():
        try:
            make()
        except Unavailable as reason:
            print(f"without {name}, whose tests will be skipped: {reason}", flush=True)


if __name__ == "__main__":
    main()
