"""The vLLM of this machine: which Python has it, and how it finds our connector."""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import LocalError

PACKAGE = "epd_engine"
NEEDED = ("vllm", "xxhash")
"""What the environment must have: vLLM itself, and the one package of the connector's that vLLM lacks."""

_LOOK = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))"
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class VllmInstallation:
    """An environment with vLLM in it."""

    python: str
    """Its interpreter; vLLM is run as a module of it, wherever its scripts are."""
    connector: str
    """A directory that holds our package alone, for PYTHONPATH: a whole site-packages of ours would put other
    versions before vLLM's own dependencies."""


def find_python(named: Path | None) -> str:
    """The interpreter with vLLM in it: the one named, else the one that runs this.

    Raises LocalError, which names the way out, where it lacks what is needed.
    """
    python = sys.executable if named is None else str(named)
    try:
        look = subprocess.run(
            [python, "-c", _LOOK, *NEEDED], capture_output=True, text=True, timeout=_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LocalError(f"{python} is no Python that runs: {error}") from None
    lacking = look.stdout.split()
    if not lacking:
        return python
    advice = "name another Python with --vllm-python PATH (or EPD_VLLM_PYTHON)"
    raise LocalError(
        f"spec.engine.type: {' and '.join(lacking)} cannot be imported by {python}; "
        f"`{python} -m pip install {' '.join(lacking)}` there, or {advice}"
    )


def make_connector(directory: Path) -> str:
    """Makes the directory that holds our package alone; its path. Raises LocalError where there is none."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise LocalError(f"{PACKAGE} is not installed; `pip install 'epd[engine]'` brings it")
    directory.mkdir()
    (directory / PACKAGE).symlink_to(Path(found.origin).parent)
    return str(directory)
