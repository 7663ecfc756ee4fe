"""Kubernetes and etcd from Debian's packages: compiled once, then taken from the cache."""

import hashlib
import os
import re
import tarfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .command import ClusterError, Unavailable, progress, run, run_long
from .packages import Apt, ensure
from .paths import CACHE_ROOT, cached


@dataclass(frozen=True)
class Patch:
    """A constant that is changed before compiling."""

    file: str
    pattern: str
    replacement: str
    why: str


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what comes out; the cache is keyed by it."""

    version: str = "1.20.2"
    source_sha256: str = "b83c0780efb182d928dc63d46488a847f161f04e40a94b96bf5247dd671ecdfc"
    go: str = "1.19"
    commands: tuple[str, ...] = (
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubelet",
        "kube-proxy",
    )
    patches: tuple[Patch, ...] = (
        Patch(
            "vendor/github.com/google/cadvisor/container/docker/factory.go",
            r"rootDirRetries(\s*)= 5",
            r"rootDirRetries\1= 0",
            "kubelet would wait for a Docker that is never there",
        ),
        Patch(
            "pkg/kubelet/status/status_manager.go",
            r"syncPeriod(\s*)= 10 \* time\.Second",
            r"syncPeriod\1= 1 * time.Second",
            "a deleted pod goes away only at the next turn of this loop",
        ),
    )
    reflect2: str = field(default="golang-github-modern-go-reflect2-dev")
    """Debian's package in place of the vendored one, which crashes when built by Go 1.18 or newer."""

    def key(self) -> str:
        """A short hash of the recipe, so that changing it builds anew."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:12]


RECIPE = Recipe()
BUILD_TOOLS = {
    "make": "make",
    "gcc": "gcc",
    "libc6-dev": "/usr/include/stdio.h",
    "rsync": "rsync",
    "jq": "jq",
}
"""Packages, each with what must be there of it."""
REFLECT2 = "github.com/modern-go/reflect2"


@dataclass(frozen=True)
class Binaries:
    """The programs of one Kubernetes version."""

    directory: Path

    def path(self, name: str) -> Path:
        """The program's full path."""
        return self.directory / name


def binaries(recipe: Recipe = RECIPE) -> Binaries:
    """Kubernetes' programs, `pause` and `etcd`; compiled by the first call (5-10 minutes on two cores)."""
    directory = CACHE_ROOT / f"kubernetes-{recipe.version}" / recipe.key()
    return Binaries(cached(directory, lambda out, work: _build(recipe, out, work)))


def _build(recipe: Recipe, out: Path, work: Path) -> None:
    if os.uname().machine != "x86_64":
        raise Unavailable("the harness' Kubernetes is built for x86_64 only")
    progress(f"Kubernetes {recipe.version} is not in the cache: building it from Debian's source package")
    ensure(BUILD_TOOLS)
    apt = Apt()
    packages, source = work / "packages", work / "source"
    try:
        apt.unpack(
            [f"golang-{recipe.go}-go", f"golang-{recipe.go}-src", recipe.reflect2, "etcd-server"], packages
        )
        apt.source("kubernetes", work)
    except ClusterError as error:
        raise Unavailable(f"apt has not the packages to build Kubernetes from: {error}") from error
    _unpack_source(recipe, work, source)
    _patch(recipe, source, packages)
    _compile(recipe, source, packages, work)
    for command in recipe.commands:
        (source / "_output/bin" / command).resolve().rename(out / command)
    run(["gcc", "-Os", "-static", "-DVERSION=1", "-o", out / "pause", source / "build/pause/linux/pause.c"])
    (packages / "usr/bin/etcd").rename(out / "etcd")
    run([out / "etcd", "--version"])


def _unpack_source(recipe: Recipe, work: Path, source: Path) -> None:
    """The upstream tree, checked against the sum that the recipe was tried with."""
    (archive,) = work.glob("kubernetes_*.orig.tar.gz")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != recipe.source_sha256:
        raise Unavailable(
            f"{archive.name} is not Kubernetes {recipe.version} as the recipe knows it ({found})"
        )
    unpacked = work / "unpacked"
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="tar")
    (top,) = unpacked.iterdir()
    top.rename(source)


def _patch(recipe: Recipe, source: Path, packages: Path) -> None:
    vendored = source / "vendor" / REFLECT2
    for pattern in ("*.go", "*.s"):
        for old in vendored.glob(pattern):
            old.unlink()
        for new in (packages / "usr/share/gocode/src" / REFLECT2).glob(pattern):
            (vendored / new.name).write_bytes(new.read_bytes())
    for patch in recipe.patches:
        file = source / patch.file
        text, count = re.subn(patch.pattern, patch.replacement, file.read_text())
        if count != 1:
            raise ClusterError(f"{patch.file}: the patch matched {count} times, not once ({patch.why})")
        file.write_text(text)


def _compile(recipe: Recipe, source: Path, packages: Path, work: Path) -> None:
    """Kubernetes' own make; without network, and with its caches in the work directory."""
    goroot = packages / f"usr/lib/go-{recipe.go}"
    gopath = source / ".go"
    (gopath / "src/k8s.io").mkdir(parents=True)
    (gopath / "src/k8s.io/kubernetes").symlink_to("../../..")
    (work / "home").mkdir()
    (work / "tmp").mkdir()
    environment = {
        "PATH": f"{goroot / 'bin'}:{os.environ['PATH']}",
        "HOME": str(work / "home"),
        "TMPDIR": str(work / "tmp"),
        "GOROOT": str(goroot),
        "GOPATH": str(gopath),
        "GOPROXY": "off",
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
        "KUBE_BUILD_PLATFORMS": "linux/amd64",
        # Without git the build would look for a version in vain.
        "KUBE_GIT_VERSION": f"v{recipe.version}",
        "KUBE_GIT_COMMIT": "unknown",
        "KUBE_GIT_TREE_STATE": "archive",
        "KUBE_GIT_MAJOR": recipe.version.split(".")[0],
        "KUBE_GIT_MINOR": recipe.version.split(".")[1],
    }
    run_long(
        ["make", f"WHAT={' '.join(f'cmd/{command}' for command in recipe.commands)}"],
        work / "make.log",
        "compiling Kubernetes (5 to 10 minutes on two cores)",
        cwd=source,
        env=environment,
    )
