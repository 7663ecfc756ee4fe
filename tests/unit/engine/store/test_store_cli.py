import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from epd_engine.cli import main
from epd_engine.ec_store.cli.parser import size
from epd_engine.ec_store.file_store import FileStore
from epd_engine.ec_store.janitor.lease import StoreLease


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four entries in two namespaces, and one of another program in the bare layout."""
    for n in range(4):
        store = FileStore(tmp_path, f"ns{n % 2}", fsync=False)
        key = f"{n + 1:x}" * 64
        metadata = {"image_grid_thw": [1, 4, n]}
        tensor = torch.zeros(n + 1, 8)
        store.save(key, tensor, fingerprint="f" * 64, modality="image", metadata=metadata)
        os.utime(store.path(key), (time.time() - 1000 + n,) * 2)
    (tmp_path / ("a" * 64)).mkdir()
    save_file({"ec_cache": torch.zeros(9, 9)}, tmp_path / ("a" * 64) / "encoder_cache.safetensors")
    return tmp_path


def path_of(root: Path, n: int) -> Path:
    return root / f"ns{(n + 1) % 2}" / (f"{n:x}" * 64) / "encoder_cache.safetensors"


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["store", *map(str, argv)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def run_json(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    code, out, err = run(capsys, *argv, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_ls_lists_entries_the_most_recently_used_first(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "ls", root)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:3] == ["NAMESPACE", "KEY", "SHAPE"]
    assert [line.split()[1][0] for line in lines[1:-1]] == ["a", "4", "3", "2", "1"]
    assert lines[1].split()[-1] == "foreign"
    assert lines[2].split()[-1] == "ok"
    assert lines[-1].startswith("5 entries")


def test_ls_as_json_says_how_much_it_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = run_json(capsys, "ls", root, "--limit", 2, "--sort", "size")
    assert (listed["entries"], listed["shown"]) == (5, 2)
    assert [row["shape"] for row in listed["list"]] == [[4, 8], [3, 8]]
    assert [row["key"][0] for row in run_json(capsys, "ls", root, "--namespace", "ns1")["list"]] == ["4", "2"]


def test_stat_counts_by_namespace(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run_json(capsys, "stat", root)
    assert said["entries"] == 5
    assert {name: count["entries"] for name, count in said["namespaces"].items()} == {
        "": 1,
        "ns0": 2,
        "ns1": 2,
    }
    assert said["bytes"] == sum(p.stat().st_size for p in root.rglob("*.safetensors"))
    assert (said["janitor"], said["report"]) == (None, None)
    code, out, _ = run(capsys, "stat", root)
    assert code == 0
    assert "janitor: none" in out


def test_verify_finds_what_is_damaged_and_ends_with_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "verify", root) == {"whole": 4, "unchecked": 1, "damaged": []}
    data = bytearray(path_of(root, 2).read_bytes())
    data[-1] ^= 1
    path_of(root, 2).write_bytes(data)
    code, out, _ = run(capsys, "verify", root, "--json")
    assert code == 1
    assert [(row["key"], row["problem"]) for row in json.loads(out)["damaged"]] == [
        ("2" * 64, "the payload does not match its checksum")
    ]
    assert run(capsys, "verify", root, "33")[0] == 0
    assert run(capsys, "verify", root, "22")[0] == 1


def test_cat_header_shows_one_entry_by_the_beginning_of_its_key(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_json(capsys, "cat-header", root, "33")
    assert (said["key"], said["namespace"], said["shape"]) == ("3" * 64, "ns0", [3, 8])
    assert said["placeholder"] == {"image_grid_thw": [1, 4, 2]}
    assert said["modelFingerprint"] == "f" * 64
    for prefix, problem in (("99", "no entry 99"), ("", "more than one entry")):
        code, _, err = run(capsys, "cat-header", root, prefix)
        assert code == 2
        assert problem in err


def test_gc_clears_and_a_dry_run_only_says_so(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-entries", 3, "--grace", 10]
    said = run_json(capsys, "gc", root, *flags, "--dry-run")
    assert (said["dryRun"], said["entriesDeleted"]) == (True, {"count": 2})
    assert path_of(root, 1).exists()
    code, out, _ = run(capsys, "gc", root, *flags)
    assert code == 0
    assert out.startswith("deleted 2 entries")
    assert [n for n in range(1, 5) if path_of(root, n).exists()] == [3, 4]
    assert not (root / ".janitor" / "report").exists(), "a report would bind writers to nobody"


def test_gc_leaves_the_store_to_a_janitor_that_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lease = StoreLease(root)
    lease.acquire()
    code, _, err = run(capsys, "gc", root, "--ttl", 1, "--grace", 0)
    assert code == 2
    assert f"process {os.getpid()}" in err
    assert path_of(root, 1).exists()
    lease.release()


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "gc"])
def test_what_is_not_a_store_is_refused(
    tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_text("x")
    code, _, err = run(capsys, action, tmp_path)
    assert code == 2
    assert "is not an EC store: no <namespace>/<mm_hash>/encoder_cache.safetensors" in err
    code, _, err = run(capsys, action, tmp_path / "nowhere")
    assert code == 2
    assert "is not a directory" in err
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["cat.png", "pictures"]


def test_an_empty_directory_is_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "stat", tmp_path)["entries"] == 0
    (tmp_path / "lost+found").mkdir()  # as a new volume has it
    assert run_json(capsys, "stat", tmp_path)["entries"] == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "at least one of --path and --memory-path"),
        (["--path", "/x", "--capacity", "8Q"], "must be bytes, such as 1000000 or 8Gi"),
        (["--path", "/x", "--ttl", "soon"], "must be a number of seconds"),
        (["--path", "/x", "--max-entries", "-1"], "must be a whole number"),
    ],
)
def test_wrong_flags_of_the_janitor_are_refused(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "janitor", *flags)
    assert code == 2
    assert problem in err


def test_marks_in_the_wrong_order_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "gc", root, "--low-water", "0.9", "--high-water", "0.5")
    assert code == 2
    assert "--low-water and --high-water" in err


@pytest.mark.parametrize(
    ("text", "count"), [("10", 10), ("8Gi", 8 << 30), ("1.5M", 1500000), ("2k", 2000), ("0.5Ti", 1 << 39)]
)
def test_sizes_are_read_as_kubernetes_writes_them(text: str, count: int) -> None:
    assert size(text) == count


def test_neither_the_command_line_nor_the_janitor_imports_torch() -> None:
    code = """
import sys
import epd_engine.cli, epd_engine.ec_store.cli.clean, epd_engine.ec_store.cli.inspect
import epd_engine.ec_store.janitor.http, epd_engine.ec_store.arena
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
