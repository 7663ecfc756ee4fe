"""Log files, the run directory and what a person sees: the parts of `epd up` that need no process."""

import io
import itertools
import os
import socket
import sys
from pathlib import Path

import pytest
from rich.console import Console

from epd_operator.local.errors import LocalError
from epd_operator.local.logs import LogFile, follow, tail
from epd_operator.local.memory import budget, is_tmpfs, make_memory, memory_directory
from epd_operator.local.ports import check_port, free_ports
from epd_operator.local.process import describe_exit, restart_delay
from epd_operator.local.progress import LineProgress, LiveProgress
from epd_operator.local.rundir import AlreadyRunning, RunDirectory, known_runs
from epd_operator.local.state import DeploymentState, Phase, ProcessState, read_state, write_state
from epd_operator.local.vllm import find_python, make_connector


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_log_has_whole_lines_behind_their_prefix(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", "pd-0")
    for piece in (b"one\ntw", b"o\r\n", b"\xff\n", b"last"):
        log.write(piece)
    assert (tmp_path / "log").read_bytes() == b"pd-0 | one\npd-0 | two\npd-0 | \xff\n"
    log.close()
    assert tail(tmp_path / "log", 1) == ["pd-0 | last"]
    assert tail(tmp_path / "log", 3)[1] == "pd-0 | \ufffd"
    assert tail(tmp_path / "other", 3) == []


def test_a_log_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", "x", rotate_at=100)
    for number in range(50):
        log.write(f"line {number}\n".encode())
    log.write(b"y" * 200)  # no end of line
    log.close()
    kept = [tmp_path / "log.old", tmp_path / "log"]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert sum(path.stat().st_size for path in kept) < 500
    assert "x | line 49" in kept[0].read_text()
    assert "y" * 200 in kept[0].read_text()


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    log = LogFile(Path("/dev/full"), "x")
    log.write(b"a line\n")
    log.close()


def test_following_loses_no_line_over_rotation_and_ends_with_the_deployment(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", "x", rotate_at=60)
    log.write(b"before\n")
    steps = iter(range(20))

    def is_over() -> bool:
        number = next(steps, None)
        if number is not None:
            log.write(f"line {number}\n".encode())
        return number is None

    lines = list(follow([tmp_path / "log"], is_over))
    log.close()
    assert lines == [f"x | line {number}" for number in range(20)]


def test_a_run_directory_is_held_by_one_and_leaves_nothing(home: Path) -> None:
    assert known_runs() == []
    with RunDirectory("a") as first:
        assert first.claim() == 0
        first.state.write_text("{}")
        first.store.mkdir()
        assert known_runs() == ["a"]
        assert RunDirectory("a").is_held()
        with pytest.raises(AlreadyRunning, match="epd down --name a"), RunDirectory("a") as second:
            second.claim()
        assert first.state.exists(), "a refused second `up` touches nothing"
        with RunDirectory("b") as other:
            other.claim()
        assert known_runs() == ["a"]
    assert not RunDirectory("a").is_held()
    assert list(home.iterdir()) == []


def test_claiming_removes_what_a_killed_run_left(home: Path) -> None:
    left = RunDirectory("a").path
    (left / "store" / "ns").mkdir(parents=True)
    (left / "state.json").write_text("{}")
    with RunDirectory("a") as again:
        again.claim()
        assert list(again.path.iterdir()) == []


def test_a_run_directory_that_cannot_be_made_names_the_way_out(home: Path) -> None:
    home.write_text("a file where the directory should be")
    with pytest.raises(LocalError, match="XDG_STATE_HOME"), RunDirectory("a") as directory:
        directory.claim()


MOUNTS = """\
22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:21 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=1g
24 22 0:22 / /mnt/once rw - tmpfs tmpfs rw
25 22 0:23 / /mnt/once rw master:1 - ext4 /dev/a rw
odd line
"""


@pytest.mark.parametrize(
    ("path", "found"), [("/dev/shm", True), ("/", False), ("/mnt/once", False), ("/dev", False)]
)
def test_a_tmpfs_is_known_by_what_is_mounted_last(path: str, found: bool) -> None:
    assert is_tmpfs(Path(path), MOUNTS) is found


def test_without_a_tmpfs_memory_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"sharedMemory: needs a tmpfs at .*; mount one there, or use"):
        budget(None, tmp_path)


def test_memory_is_what_was_asked_for_or_a_quarter_of_what_is_free() -> None:
    assert budget(4096).capacity == 4096
    assert budget(4096).note == ""
    granted = budget(10 << 60)
    found = os.statvfs("/dev/shm")
    assert 0 < granted.capacity <= found.f_blocks * found.f_frsize // 4
    assert (
        f"takes {granted.capacity >> 20} MiB, not {10 << 40} MiB: a quarter of what is free" in granted.note
    )
    assert ", not" not in budget(None).note


def test_memory_goes_with_its_run_and_runs_of_one_name_have_their_own(home: Path) -> None:
    with RunDirectory("a") as directory:
        directory.claim()
        assert directory.memory.parent == Path("/dev/shm")
        assert directory.memory != memory_directory(home / "other" / "a")
        make_memory(directory.memory)
        assert directory.memory.stat().st_mode & 0o777 == 0o700
        (directory.memory / "arena").write_bytes(b"x")
        with pytest.raises(LocalError, match="--name"):
            make_memory(directory.memory)
    assert not directory.memory.exists()


def test_claiming_removes_the_memory_of_a_killed_run_and_nothing_else(home: Path, tmp_path: Path) -> None:
    directory = RunDirectory("a")
    kept = tmp_path / "kept"
    kept.mkdir()
    try:
        make_memory(directory.memory)
        with directory:
            directory.claim()
            assert not directory.memory.exists()
            directory.memory.symlink_to(kept)
        assert kept.exists()
        assert directory.memory.is_symlink(), "not what we made"
    finally:
        directory.memory.unlink(missing_ok=True)


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = DeploymentState("a", "m", "http://x", 1, "/d", "/s", Phase.READY, [ProcessState("pd-0", "pd", 5)])
    write_state(tmp_path / "state.json", state)
    assert read_state(tmp_path / "state.json") == state
    assert read_state(tmp_path / "none.json") is None
    assert [path.name for path in tmp_path.glob("state*")].count("state.json") == 1


def test_ports_are_free_and_different_and_a_taken_one_names_the_flag() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    check_port("127.0.0.1", ports[0])
    with socket.create_server(("127.0.0.1", ports[0])), pytest.raises(LocalError, match="--port"):
        check_port("127.0.0.1", ports[0])


def test_the_wait_before_a_restart_doubles_up_to_a_bound() -> None:
    delays = [restart_delay(failures) for failures in range(12)]
    assert all(later == min(30.0, 2 * earlier) for earlier, later in itertools.pairwise(delays))
    assert delays[0] > 0
    assert restart_delay(10**6) == delays[-1] == 30.0


def test_an_exit_is_said_in_words() -> None:
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-9) == "killed by SIGKILL"


@pytest.fixture
def state() -> DeploymentState:
    return DeploymentState(
        "a", "m", "http://x", 1, "/d", "/s", Phase.STARTING, [ProcessState("pd-0", "pd", 5)]
    )


def test_plain_progress_is_one_line_for_each_change(state: DeploymentState) -> None:
    out = io.StringIO()
    progress = LineProgress(Console(file=out, width=40))
    progress.update(state)
    progress.update(state)
    state.processes[0].phase = Phase.RESTARTING
    state.processes[0].note = "exit status [1]; " + "long " * 20
    progress.update(state)
    starting, restarting = out.getvalue().splitlines()
    assert starting.split() == ["pd-0", "starting"]
    assert restarting.startswith("pd-0       restarting: exit status [1]; long")


def test_live_progress_becomes_lines_once_closed(state: DeploymentState) -> None:
    out = io.StringIO()
    progress = LiveProgress(Console(file=out, force_terminal=True, width=80))
    progress.update(state)
    state.processes[0].phase = Phase.READY
    progress.update(state)
    progress.close()
    table = out.getvalue()
    assert "pd-0" in table
    assert "ready" in table
    progress.update(state)
    state.processes[0].phase = Phase.NOT_READY
    progress.update(state)
    assert out.getvalue().removeprefix(table) == "pd-0       not ready\n", (
        "what the table says is not said again"
    )


def test_a_python_without_vllm_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"vllm .*cannot be imported .* --vllm-python PATH"):
        find_python(None)
    with pytest.raises(LocalError, match="is no Python that runs"):
        find_python(tmp_path / "python")


def test_a_python_with_vllm_is_taken(tmp_path: Path) -> None:
    for name in ("vllm", "xxhash"):
        (tmp_path / name).mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert find_python(python) == str(python)


def test_vllm_finds_our_package_and_nothing_beside_it(tmp_path: Path) -> None:
    connector = Path(make_connector(tmp_path / "connector"))
    assert [entry.name for entry in connector.iterdir()] == ["epd_engine"]
    assert (connector / "epd_engine" / "__init__.py").is_file()
