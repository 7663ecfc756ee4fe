"""KV on its way from prefill to decode, as files: where it lies, and what becomes of what nobody took.

    <area>/<namespace>/<transfer id>/000000-000012.safetensors     blocks 0 to 11 of a prompt, all layers
    <area>/<namespace>/<transfer id>.pulled/                       the same, once a decode instance has it

Next to an EC store the area is its directory `kv`. A transfer's id is 64 hex digits that its producer drew.
Whoever takes a transfer renames its directory, which only one can. No torch: the janitor clears it too.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

KV_DIRECTORY = "kv"
PULLED = ".pulled"
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_TRANSFER = re.compile(r"[0-9a-f]{64}(\.pulled)?")


def transfers(area: Path) -> Iterator[Path]:
    """Directories of transfers, claimed or not; names that are not ours are left out. Raises OSError."""
    try:
        with os.scandir(area) as found:
            namespaces = [
                entry.path
                for entry in found
                if _NAMESPACE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return
    for namespace in namespaces:
        try:
            with os.scandir(namespace) as found:
                for entry in found:
                    if _TRANSFER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                        yield Path(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue


def used_bytes(transfer: Path) -> int:
    """Of a transfer's files, finished or not; 0 once it is gone."""
    total = 0
    try:
        with os.scandir(transfer) as files:
            for file in files:
                total += file.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return total  # taken or cleared meanwhile
    return total


def is_older(transfer: Path, than: float) -> bool:
    """Whether nothing has come into it, nor has it been claimed, since `than` (the file system's clock)."""
    try:
        return os.stat(transfer).st_mtime < than
    except FileNotFoundError:
        return False


def remove(transfer: Path) -> bool:
    """Whether there was something to remove. Raises OSError where the volume refuses."""
    try:
        shutil.rmtree(transfer)
    except FileNotFoundError:
        return False
    return True
