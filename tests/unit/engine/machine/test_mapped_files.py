"""Pages of mapped files, on real files and the real kernel."""

import mmap
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from epd_engine.machine.mapped_files import forget_pages

LENGTH = 8 << 20


def resident(path: Path) -> int:
    return sum(m.rss for m in psutil.Process().memory_maps(grouped=False) if m.path == str(path.resolve()))


def test_what_was_read_is_given_back_and_reads_the_same_again(tmp_path: Path) -> None:
    file, link = tmp_path / "model.safetensors", tmp_path / "link.safetensors"
    weight = torch.arange(LENGTH // 4, dtype=torch.int32)
    save_file({"weight": weight}, file)
    link.symlink_to(file)  # as the hub's cache has them
    with safe_open(link, framework="pt") as opened:
        mapped = opened.get_tensor("weight")
    assert torch.equal(mapped, weight)
    assert resident(file) >= LENGTH
    assert forget_pages([link]) >= LENGTH
    assert resident(file) == 0
    assert torch.equal(mapped, weight)


def test_what_was_changed_in_memory_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(LENGTH))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        mapped[0:4] = b"kept"
        assert forget_pages([path]) == 0
        assert mapped[0:4] == b"kept"


def test_a_file_that_nobody_maps(tmp_path: Path) -> None:
    assert forget_pages([tmp_path / "absent"]) == 0


def test_where_the_kernel_does_not_say_what_is_mapped_nothing_is_given_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_maps", refused)
    assert forget_pages([tmp_path]) == 0
