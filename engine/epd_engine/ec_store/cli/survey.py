"""A store found and walked."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from epd_engine.ec_store.janitor import scan
from epd_engine.ec_store.layout import ENTRY_NAME, JANITOR_DIRECTORY


class NoStore(Exception):
    """The path is not an EC store, or the key is not in it; the message says why."""


@dataclass(frozen=True)
class Place:
    """A directory that can hold an entry."""

    namespace: str
    base: Path
    key: str

    @property
    def path(self) -> Path:
        return self.base / self.key / ENTRY_NAME


def check_store(root: Path) -> Path:
    """The path itself. Raises `NoStore` for one that holds something else than a store."""
    if not root.is_dir():
        raise NoStore(f"{root} is not a directory")
    try:
        others = (path for path in root.iterdir() if path.name != "lost+found")
        if (root / JANITOR_DIRECTORY).is_dir() or next(places(root), None) or not any(others):
            return root
    except OSError as error:
        raise NoStore(f"{root} cannot be read: {error.strerror}") from error
    raise NoStore(
        f"{root} is not an EC store: no <namespace>/<mm_hash>/{ENTRY_NAME} and no {JANITOR_DIRECTORY} in it"
    )


def places(root: Path, namespace: str | None = None) -> Iterator[Place]:
    """All of a store, or of one namespace. Raises OSError, and `NoStore` for an unknown namespace."""
    known = scan.namespaces(root)
    if namespace is not None and namespace not in known:
        raise NoStore(f"{root} has no namespace {namespace!r}; it has {', '.join(map(repr, known))}")
    for name in known if namespace is None else [namespace]:
        try:
            for key in scan.keys(root / name):
                yield Place(name, root / name, key)
        except (FileNotFoundError, PermissionError):
            continue  # removed meanwhile, or not a namespace (a volume's lost+found)


def find(root: Path, prefix: str) -> Place:
    """The one place whose key begins so. Raises `NoStore`."""
    found = list(islice((place for place in places(root) if place.key.startswith(prefix)), 3))
    if not found:
        raise NoStore(f"no entry {prefix} in {root}")
    if len(found) > 1:
        where = ", ".join(f"{place.namespace or '(bare)'}/{place.key}" for place in found)
        raise NoStore(f"{prefix} stands for more than one entry in {root}: {where} ...")
    return found[0]
