"""Limits of memory as kernels show them, in both versions and from within a container."""

from pathlib import Path

import pytest

from epd_engine.machine.cgroup import memory_left

MIB = 1 << 20
V2 = ("memory.max", "memory.current", "")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    stat = f"anon 1\n{names[2]}active_file {cached}\n{names[2]}inactive_file {MIB}\n"
    (folder / "memory.stat").write_text(stat)


def left(tmp_path: Path, said: str) -> int | None:
    proc = tmp_path / "cgroup"
    proc.write_text(said)
    return memory_left(proc, tmp_path / "mount")


def test_files_in_the_page_cache_are_free(tmp_path: Path) -> None:
    group(tmp_path / "mount/pod", V2, str(100 * MIB), 60 * MIB, 20 * MIB)
    assert left(tmp_path, "0::/pod\n") == (100 - 60 + 20 + 1) * MIB


@pytest.mark.parametrize(("inner", "outer", "wanted"), [("max", 50, 51), (30, "max", 31), (30, 50, 31)])
def test_the_tightest_of_the_groups_around_counts(
    tmp_path: Path, inner: int | str, outer: int | str, wanted: int
) -> None:
    for folder, limit in (("pod/container", inner), ("pod", outer)):
        said = limit if isinstance(limit, str) else str(limit * MIB)
        group(tmp_path / "mount" / folder, V2, said, 0, 0)
    assert left(tmp_path, "0::/pod/container\n") == wanted * MIB


def test_version_1_is_read_from_the_memory_hierarchy(tmp_path: Path) -> None:
    group(tmp_path / "mount/memory/pod", V1, str(40 * MIB), 10 * MIB, 0)
    assert left(tmp_path, "5:cpu,cpuacct:/other\n4:memory:/pod\n0::/\n") == 31 * MIB


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """In version 1 the path that the kernel tells is then the host's, and not to be found inside."""
    group(tmp_path / "mount/memory", V1, str(40 * MIB), 0, 0)
    assert left(tmp_path, "4:memory:/kubepods/pod1/abc\n") == 41 * MIB


@pytest.mark.parametrize("said", ["", "0::/\n", "4:memory:/pod\n"])
def test_no_limit_is_none(tmp_path: Path, said: str) -> None:
    assert left(tmp_path, said) is None
    assert memory_left(tmp_path / "absent", tmp_path) is None


def test_who_is_beyond_the_limit_has_nothing_left(tmp_path: Path) -> None:
    group(tmp_path / "mount", V2, str(10 * MIB), 20 * MIB, 0)
    assert left(tmp_path, "0::/\n") == 0
