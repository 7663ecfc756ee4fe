"""Debian packages, by apt with lists of its own: the system's package lists and sources stay as they are."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .command import Unavailable, progress, run, run_long
from .paths import CACHE_ROOT, locked

SYSTEM_SOURCES = Path("/etc/apt")
POLICY = Path("/usr/sbin/policy-rc.d")
"""Asked by every package's scripts whether its service may start; 101 means no."""
FORBID_SERVICES = "#!/bin/sh\nexit 101\n"


def missing(packages: Mapping[str, str]) -> list[str]:
    """Those of the packages whose program (or file) is not there; it may come from another package, too."""
    return [name for name, file in packages.items() if shutil.which(file) is None and not Path(file).exists()]


def ensure(packages: Mapping[str, str]) -> None:
    """Installs what is lacking; nothing starts by itself, and nothing installed is replaced."""
    if not missing(packages):
        return
    with locked(CACHE_ROOT / "apt-install.lock"):
        lacking = missing(packages)
        if not lacking:
            return
        if os.getuid() != 0 or shutil.which("apt-get") is None:
            raise Unavailable(f"needs these Debian packages, or root to install them: {' '.join(lacking)}")
        options = ["--yes", "--no-install-recommends", "--no-remove"]
        with _no_services():
            run_long(
                [*Apt().command("apt-get"), "install", *options, *lacking],
                CACHE_ROOT / "apt-install.log",
                f"installing {' '.join(lacking)}",
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )


@contextmanager
def _no_services() -> Iterator[None]:
    """While installing, no package may start its service. A policy that is already there is kept."""
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text(FORBID_SERVICES)
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)


class Apt:
    """apt on the system's sources plus their source packages. Works for any user."""

    def __init__(self, home: Path = CACHE_ROOT / "apt") -> None:
        if shutil.which("apt-get") is None:
            raise Unavailable("needs apt: not a Debian system")
        self._home = home
        with locked(home / "update.lock"):
            self._prepare()

    def command(self, program: str) -> list[str]:
        """The program with our own places in front."""
        settings = {
            "Dir::Etc::SourceList": self._home / "sources.list",
            "Dir::Etc::SourceParts": self._home / "sources",
            "Dir::State::Lists": self._home / "lists",
            "Dir::Cache": self._home / "cache",
            # Downloads go to directories that the sandbox user may not enter.
            "APT::Sandbox::User": "root",
        }
        return [
            program,
            "-q",
            *(word for key, value in settings.items() for word in ("-o", f"{key}={value}")),
        ]

    def unpack(self, packages: Sequence[str], target: Path) -> None:
        """Unpacks packages below a directory without installing them."""
        downloads = target / ".downloads"
        downloads.mkdir(parents=True)
        run([*self.command("apt-get"), "download", *packages], cwd=downloads)
        for package in sorted(downloads.glob("*.deb")):
            run(["dpkg-deb", "--extract", package, target])
        shutil.rmtree(downloads)

    def source(self, package: str, target: Path) -> None:
        """Downloads a source package, not unpacked."""
        run([*self.command("apt-get"), "source", "--download-only", package], cwd=target)

    def _prepare(self) -> None:
        """Fetches the lists, unless those of this very configuration lie there."""
        texts = {
            path.relative_to(SYSTEM_SOURCES): _with_source_packages(path)
            for path in (
                SYSTEM_SOURCES / "sources.list",
                *sorted((SYSTEM_SOURCES / "sources.list.d").glob("*")),
            )
            if path.suffix in (".list", ".sources") and path.is_file()
        }
        stamp = self._home / "stamp"
        wanted = "\n".join(f"# {name}\n{text}" for name, text in texts.items())
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        for directory in ("lists/partial", "cache/archives/partial", "sources"):
            (self._home / directory).mkdir(parents=True, exist_ok=True)
        (self._home / "sources.list").touch()
        for name, text in texts.items():
            target = self._home / ("sources.list" if name.name == "sources.list" else f"sources/{name.name}")
            target.write_text(text)
        progress("fetching the lists of packages")
        run([*self.command("apt-get"), "update"])
        stamp.write_text(wanted)


def _with_source_packages(path: Path) -> str:
    """A sources file that also names the source packages; both of apt's formats."""
    text = path.read_text()
    if path.suffix == ".sources":
        return re.sub(r"(?mi)^Types:.*$", "Types: deb deb-src", text)
    binary = [line for line in text.splitlines() if re.match(r"deb\s", line)]
    return "\n".join([*binary, *(re.sub(r"^deb\s", "deb-src ", line) for line in binary), ""])
