"""The janitor as a process: its lease, its HTTP side, and writers that keep within its budget."""

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event as Flag
from pathlib import Path

import httpx
import pytest
import torch

from epd_engine.ec_store.errors import StoreUnavailable
from epd_engine.ec_store.file_store import FileStore
from epd_engine.ec_store.leases import LeaseTable
from tests.support.processes import BIN, Server, free_port

ROWS, WIDTH = 64, 256
PAYLOAD = ROWS * WIDTH * 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    return path


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a janitor of `root` and waits until it is ready."""
    started: list[Server] = []

    def begin(*flags: str) -> Server:
        port = free_port()
        command = [str(BIN / "epd-engine"), "store", "janitor", "--path", str(root)]
        command += ["--interval", "0.5", "--port", str(port), *flags]
        log = tmp_path / f"janitor{len(started)}.log"
        started.append(Server("janitor", command, port, log).start())
        return started[-1].wait_ready()

    yield begin
    for server in started:
        if server.exit_code is None:
            os.kill(server.pid, signal.SIGCONT)
            os.kill(server.pid, signal.SIGKILL)


def put(root: Path, number: int, namespace: str = "ns") -> Path:
    store = FileStore(root, namespace, fsync=False)
    key = f"{number:064x}"
    store.save(key, torch.zeros(ROWS, WIDTH), fingerprint="f" * 64, modality="image", metadata={})
    return store.path(key)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def run_out(root: Path) -> None:
    """Makes the janitor's lease too old, so that nobody need wait for that."""
    for lease in (root / ".janitor").glob("lease.*"):
        os.utime(lease, (1, 1))


def usage(server: Server) -> dict[str, float]:
    answer: dict[str, float] = httpx.get(f"{server.url}/usage").json()
    return answer


def ended(server: Server) -> bool:
    return server.exit_code is not None


def test_it_says_how_full_the_store_is_and_keeps_it_within_its_marks(
    root: Path, start: Callable[..., Server]
) -> None:
    first = put(root, 0)
    os.utime(first, (1, 1))
    server = start("--capacity", str(10 * PAYLOAD), "--grace", "1000")
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert (usage(server)["entries"], usage(server)["capacity"]) == (1, 10 * PAYLOAD)
    paths = [put(root, n) for n in range(1, 9)]
    until(lambda: not first.exists(), "nine entries of ten are above the mark, and the first is the oldest")
    assert all(path.exists() for path in paths)
    until(lambda: usage(server)["entries"] == 8, "usage does not follow")
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'epd_store_cleared_entries_total{reason="capacity"} 1.0' in metrics
    assert "epd_store_entries 8.0" in metrics


def test_sigterm_frees_the_lease_and_the_next_one_begins_at_once(
    root: Path, start: Callable[..., Server]
) -> None:
    first = start()
    os.kill(first.pid, signal.SIGTERM)
    until(lambda: ended(first), "it does not end")
    assert first.exit_code == 0
    second = start()
    until(lambda: usage(second)["isJanitor"] == 1, "the lease was not free")


def test_a_second_janitor_stands_by_and_takes_over_from_a_dead_one(
    root: Path, start: Callable[..., Server]
) -> None:
    first = start()
    second = start("--ttl", "0.001", "--grace", "0")
    assert httpx.get(f"{second.url}/ready").json() == {"status": "standby"}
    entry = put(root, 0)
    os.kill(first.pid, signal.SIGKILL)
    assert entry.exists()
    run_out(root)
    until(lambda: not entry.exists(), "nobody took over")
    assert httpx.get(f"{second.url}/ready").json() == {"status": "janitor"}


def test_a_janitor_that_was_paused_deletes_nothing_once_another_took_over(
    root: Path, start: Callable[..., Server]
) -> None:
    paused = start("--ttl", "3", "--grace", "0")
    os.kill(paused.pid, signal.SIGSTOP)
    run_out(root)
    second = start("--capacity", "1Gi")
    assert httpx.get(f"{second.url}/ready").json() == {"status": "janitor"}
    entry = put(root, 0)
    os.utime(entry, (1, 1))
    os.kill(paused.pid, signal.SIGCONT)
    until(lambda: httpx.get(f"{paused.url}/ready").json() == {"status": "standby"}, "it did not notice")
    assert entry.exists()
    until(lambda: usage(second)["entries"] == 1, "the new one does not work")


def test_an_entry_under_lease_outlives_its_ttl(root: Path, start: Callable[..., Server]) -> None:
    leased, free = put(root, 0), put(root, 1)
    table = LeaseTable(root / "ns", 60)
    table.take(f"{0:064x}")
    start("--ttl", "0.5", "--grace", "0")
    until(lambda: not free.exists(), "the other one stays too")
    assert leased.exists()
    table.close()
    until(lambda: not leased.exists(), "it stays after the lease")


def test_memory_alone_can_be_kept_clean(tmp_path: Path) -> None:
    port = free_port()
    command = [
        str(BIN / "epd-engine"),
        "store",
        "janitor",
        "--memory-path",
        str(tmp_path),
        "--port",
        str(port),
    ]
    server = Server("janitor", command, port, tmp_path / "log").start()
    try:
        server.wait_ready()
        until(lambda: httpx.get(f"{server.url}/usage").status_code == 200, "it does not look")
        assert usage(server) == {"bytes": 0, "entries": 0, "capacity": 0, "committed": 0, "arenas": 0}
    finally:
        os.kill(server.pid, signal.SIGTERM)
        until(lambda: ended(server), "it does not end")


def test_a_port_that_is_taken_ends_it(root: Path, start: Callable[..., Server]) -> None:
    taken = start()
    command = [str(BIN / "epd-engine"), "store", "janitor", "--path", str(root), "--port", str(taken.port)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode != 0
    assert "Address already in use" in found.stderr


def write(root: Path, seed: int, stop: Flag, namespace: str) -> None:
    """Saves new entries, one after another and in groups, until told to end."""
    store, number = FileStore(root, namespace, fsync=False), 0
    tensor = torch.zeros(ROWS, WIDTH)
    while not stop.is_set():
        number += 1
        key = f"{seed:032x}{number:032x}"
        try:
            store.save(key, tensor, fingerprint="f" * 64, modality="image", metadata={})
        except StoreUnavailable as error:
            if "the EC store is full" not in str(error):
                raise
        time.sleep(0.01)


def bytes_of(root: Path) -> int:
    """Of entries and of saves in progress; of files that go meanwhile, nothing."""
    total = 0
    for folder, directories, files in os.walk(root):
        directories[:] = [name for name in directories if name != ".janitor"]
        for name in files:
            try:
                total += os.stat(f"{folder}/{name}").st_size
            except FileNotFoundError:
                continue
    return total


def test_writers_keep_within_the_budget_whatever_is_killed(root: Path, start: Callable[..., Server]) -> None:
    """The bound is the budget and one entry a writer, and what a killed writer left."""
    budget, writers = 40 * PAYLOAD, 4
    flags = ["--capacity", str(budget), "--grace", "1", "--rate", "10000"]
    janitor = start(*flags)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "epd_engine.ec_store.file_store"])
    stop = context.Event()

    def begin(seed: int) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=write, args=(root, seed, stop, f"ns{seed % 2}"))
        process.start()
        return process

    running = [begin(seed) for seed in range(writers)]
    started, worst, seen = writers, 0, 0
    until(lambda: usage(janitor)["writers"] == writers, "the writers do not begin")
    for turn in range(60):
        worst = max(worst, bytes_of(root))
        seen = max(seen, int(httpx.get(f"{janitor.url}/usage").json()["bytes"]))
        time.sleep(0.05)
        if turn == 20:
            running[0].kill()
            running[0] = begin(started)
            started += 1
        if turn == 40:
            os.kill(janitor.pid, signal.SIGKILL)
            run_out(root)
            janitor = start(*flags)
    cleared = httpx.get(f"{janitor.url}/metrics").text
    stop.set()
    for process in running:
        process.join(30)
    assert [process.exitcode for process in running] == [0] * writers
    assert worst <= budget + (started + 1) * (PAYLOAD + 1024)
    assert worst > budget // 2, "the writers did not come near the budget"
    assert "epd_store_cleared_entries_total" in cleared
    until(lambda: usage(janitor)["bytes"] == bytes_of(root), "the janitor's numbers are not what lies there")
