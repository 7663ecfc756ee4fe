"""Container images without a registry.

A base image is made by debootstrap, wheels are fetched on the host, and buildah builds. The same input gives
the same image id, so building again costs next to nothing and loading again is skipped.
"""

import hashlib
import json
import os
import shutil
import sys
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from .build import Binaries
from .command import ClusterError, Unavailable, Word, run, run_long
from .packages import Apt, ensure
from .paths import CACHE_ROOT, REPOSITORY, cached, locked

IMAGE_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
IMAGES = CACHE_ROOT / "images"
SUITE = "bookworm"
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libnuma1")  # the last one for vLLM
BASE_PYTHON = (3, 11)
"""Of that suite; wheels are fetched by the Python that runs this, which must be of the same version."""
BASE_IMAGE = f"localhost/epd-base:{SUITE}-2"
TRIMMED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
)
PAUSE_IMAGE = "localhost/pause:1"
WHEELS_INSIDE = "/wheels"
CONSTRAINTS = REPOSITORY / ".ci/constraints.txt"
TORCH = os.environ.get("TORCH", "torch==2.13.0")


def build_image(
    dockerfile: Path | str,
    tag: str,
    *,
    context: Path = REPOSITORY,
    extra: str | None = None,
    build_args: Mapping[str, str] | None = None,
    target: str | None = None,
) -> Path:
    """Builds a Dockerfile; the path of an oci-archive that carries the image under `tag`.

    The Dockerfile begins with `ARG BASE=python:3.11-slim-bookworm` and `FROM ${BASE}`; it gets a base of the
    same kind. With `extra` (an extra of this project, "operator" say) the wheels of that extra and the build
    backend lie in a read-only directory: a stage that declares `ARG PIP_NO_INDEX` and `ARG PIP_FIND_LINKS`
    needs nothing else for `pip install ".[operator]"` to find them.
    """
    _ready()
    arguments = {"BASE": base_image(), **(build_args or {})}
    volumes: list[str] = []
    if extra is not None:
        wheels = wheelhouse(extra)
        # The name inside carries the content's hash: other wheels are another command to the build's cache.
        inside = f"{WHEELS_INSIDE}/{wheels.name}"
        arguments |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": inside}
        volumes = [f"--volume={wheels}:{inside}:ro"]
    options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    if target is not None:
        options.append(f"--target={target}")
    name = tag if "/" in tag else f"localhost/{tag}"
    file = Path(dockerfile) if Path(dockerfile).is_absolute() else REPOSITORY / dockerfile
    return _bud(file, context, name, [*options, *volumes])


def base_image() -> str:
    """The name of the base image, which exists when this returns."""
    _ready()
    with locked(IMAGES / "base.lock"):
        if not _image_id(BASE_IMAGE):
            root = cached(CACHE_ROOT / "base" / BASE_IMAGE.rsplit(":", 1)[1], _debootstrap)
            _bud_in_cache(root, BASE_IMAGE, ["FROM scratch", "ADD root.tar /", 'CMD ["python3"]'])
    return BASE_IMAGE


def pause_image(programs: Binaries) -> Path:
    """What holds a pod's namespaces open. An oci-archive."""
    archive = programs.directory.with_name(f"{programs.directory.name}-pause.tar")
    if not archive.exists():
        _ready()
        lines = ["FROM scratch", "COPY pause /pause", 'ENTRYPOINT ["/pause"]']
        made = _bud_in_cache(programs.directory, PAUSE_IMAGE, lines)
        made.rename(archive)
    return archive


def wheelhouse(extra: str) -> Path:
    """Wheels of all that one of the project's extras needs, and of what builds the project."""
    if sys.version_info[:2] != BASE_PYTHON:
        raise Unavailable(
            f"images carry Python {BASE_PYTHON}, and wheels are fetched by the same version only"
        )
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"][extra],
        # pip builds the project itself inside the image, where no index is to take the backend from.
        *project["build-system"]["requires"],
    ]
    constraints = f"{CONSTRAINTS.read_text()}\n{TORCH}\n"
    key = hashlib.sha256("\0".join([*wanted, constraints]).encode()).hexdigest()[:16]

    def fetch(out: Path, work: Path) -> None:
        file = work / "constraints.txt"
        file.write_text(constraints)
        pip: list[Word] = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--wheel-dir",
            out,
            "--constraint",
            file,
        ]
        run_long([*pip, *wanted], work / "pip.log", f"fetching wheels of [{extra}]")

    return cached(CACHE_ROOT / "wheels" / f"{extra}-{key}", fetch)


def archive_identity(archive: Path) -> tuple[str, str]:
    """The name and the manifest's digest in an oci-archive; containerd lists images with both."""
    with tarfile.open(archive) as tar:
        index = tar.extractfile("index.json")
        if index is None:
            raise ClusterError(f"{archive} is no oci-archive")
        manifest = json.load(index)["manifests"][0]
    return str(manifest["annotations"]["org.opencontainers.image.ref.name"]), str(manifest["digest"])


def _ready() -> None:
    if os.getuid() != 0:
        raise Unavailable("building images needs root")
    ensure(IMAGE_PACKAGES)


def _debootstrap(out: Path, work: Path) -> None:
    """A minimal Debian with Python, as a tar."""
    sources = run([*Apt().command("apt-get"), "indextargets", "--format", "$(RELEASE) $(REPO_URI)"])
    mirrors = [line.split()[1] for line in sources.splitlines() if line.split()[0] == SUITE]
    root = work / "root"
    options = ["--variant=minbase", f"--include={','.join(BASE_PACKAGES)}"]
    command: list[Word] = ["debootstrap", *options, SUITE, root, *mirrors[:1]]
    # In a mount namespace: what debootstrap mounts is gone when it ends, however it ends.
    run_long(
        ["unshare", "--mount", *command], work / "debootstrap.log", "making the base image (about a minute)"
    )
    for name in TRIMMED:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir(parents=True)
    os.symlink("python3", root / "usr/bin/python")
    run(["tar", "--create", "--numeric-owner", f"--directory={root}", f"--file={out / 'root.tar'}", "."])


def _bud_in_cache(context: Path, name: str, lines: Sequence[str]) -> Path:
    """Builds from a few lines of a Dockerfile."""
    dockerfile = IMAGES / f"{name.rsplit('/', 1)[1].replace(':', '-')}.Dockerfile"
    dockerfile.parent.mkdir(parents=True, exist_ok=True)
    dockerfile.write_text("\n".join(lines) + "\n")
    return _bud(dockerfile, context, name, [])


def _bud(dockerfile: Path, context: Path, name: str, options: Sequence[str]) -> Path:
    """Builds, and writes the archive; an archive that is there is taken."""
    fixed: list[Word] = ["--isolation=chroot", "--layers", "--timestamp=0", f"--tag={name}"]
    short = f"{name.rsplit('/', 1)[1].replace(':', '-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    log = IMAGES / f"{short}.log"
    with locked(IMAGES / f"{short}.lock"):
        log.unlink(missing_ok=True)
        command = [*_buildah("bud"), *fixed, f"--file={dockerfile}", *options, context]
        run_long(command, log, f"building {name}")
        archive = IMAGES / f"{short}-{_image_id(name)[:16]}.tar"
        if not archive.exists():
            _write_archive(name, archive)
            for older in IMAGES.glob(f"{short}-*.tar"):
                if older != archive:
                    older.unlink(missing_ok=True)
    return archive


def _write_archive(name: str, archive: Path) -> None:
    partial = archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    # Layers in an oci-archive are compressed whatever one asks for, so by the quickest there is.
    quick = ["--compression-format=zstd", "--compression-level=1"]
    run([*_buildah("push"), *quick, name, f"oci-archive:{partial}:{name}"])
    partial.rename(archive)


def _image_id(name: str) -> str:
    """Empty where there is no such image."""
    listed = run([*_buildah("images"), "--format={{.ID}} {{.Name}}:{{.Tag}}", "--no-trunc"])
    ids = [line.split()[0] for line in listed.splitlines() if line.split()[1] == name]
    return ids[0].removeprefix("sha256:") if ids else ""


def _buildah(subcommand: str) -> list[Word]:
    """buildah with a store of our own, in a mount namespace that takes its mounts along when it ends."""
    store: list[Word] = [
        "--root",
        CACHE_ROOT / "buildah",
        "--runroot",
        CACHE_ROOT / "buildah-run",
        "--storage-driver=overlay",
    ]
    return ["unshare", "--mount", "buildah", *store, subcommand]
