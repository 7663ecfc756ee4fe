"""The janitor on a large store: how soon it knows a million entries, in what memory, how fast it clears.

    python benchmarks/janitor.py [--quick] [--json FILE] [--path DIR]

Makes a store of small entries in a temporary directory (in --path, if given: some 8 GB for a million), runs
`epd-engine store janitor` on it as a process, and kills and restarts it. What the store itself can do is
measured in the same run: one thread that only stats, or only deletes, the same files.
"""

import argparse
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from report import Row, print_table, write_json

from epd_engine.ec_store.entry import Expectation, encode_header, payload_view
from epd_engine.ec_store.errors import EntryMissing
from epd_engine.ec_store.file_store import FileStore
from epd_engine.ec_store.layout import ENTRY_NAME

FULL, QUICK = 1_000_000, 50_000
LIMIT_SECONDS, LIMIT_MB, LIMIT_PROBE_US = 60.0, 300.0, 50.0
NAMESPACE, FINGERPRINT = "0123456789abcdef", "f" * 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} entries: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--path", type=Path, metavar="DIR", help="where to make the store")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.path, prefix="janitor-") as folder:
        rows = run(Path(folder), QUICK if arguments.quick else FULL)
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)


def run(root: Path, count: int) -> list[Row]:
    empty = probes(root / "empty")
    print(f"making {count} entries ...", flush=True)
    size = fill(root / NAMESPACE, count)
    full = probes(root)
    print("stat of each, by one thread ...", flush=True)
    began = time.process_time()
    for key in os.listdir(root / NAMESPACE):
        os.stat(f"{root}/{NAMESPACE}/{key}/{ENTRY_NAME}")
    peer_look = time.process_time() - began
    rows = [
        Row(f"has-item check, hit, {count} entries", full[0], "us", "limit", LIMIT_PROBE_US, 1.0),
        Row(f"has-item check, miss, {count} entries", full[1], "us", "limit", LIMIT_PROBE_US, 1.0),
        Row(f"has-item check, hit, {count} entries", full[0], "us", "empty store", empty[0], 0.8),
        *watched(root, count, peer_look),
    ]
    return rows + cleared(root, count, size)


def watched(root: Path, count: int, peer_look: float) -> list[Row]:
    """Start and restart on a store that has no need of clearing."""
    print("janitor ...", flush=True)
    with janitor(root, "--capacity", "1Ti", "--interval", "1") as (process, url, first):
        until(lambda: looks(url) >= 4)
        idle = metric(url, "epd_store_look_seconds")
        process.send_signal(signal.SIGKILL)
        process.wait()
        for lease in (root / ".janitor").glob("lease.*"):
            os.utime(lease, (1, 1))  # how long a dead janitor's lease lasts is not what is measured
    with janitor(root, "--capacity", "1Ti", "--interval", "1") as (process, url, again):
        memory, spent = peak_mb(process.pid), cpu_seconds(process.pid)
        began = time.perf_counter()
        process.terminate()
        process.wait()
        ends = time.perf_counter() - began
    return [
        Row(f"first look at {count} entries, start included", first, "s", "limit", LIMIT_SECONDS, 1.0),
        Row("restart after SIGKILL, to ready", again, "s", "limit", LIMIT_SECONDS, 1.0),
        Row("restart after SIGKILL, processor time", spent, "s", "limit", LIMIT_SECONDS, 1.0),
        Row("restart after SIGKILL, processor time", spent, "s", "stat of each entry", peer_look),
        Row("a look with nothing new", idle, "s", "limit", 1.0, 1.0),
        Row("resident memory, peak", memory, "MB", "limit", LIMIT_MB, 1.0),
        Row("SIGTERM to end", ends, "s", "limit", 1.0, 1.0),
    ]


def cleared(root: Path, count: int, size: int) -> list[Row]:
    """Clearing a tenth of the store at full speed, against deleting as many in a loop."""
    print("clearing ...", flush=True)
    part = count // 10
    keys = os.listdir(root / NAMESPACE)[:part]
    began = time.perf_counter()
    for key in keys:
        os.unlink(f"{root}/{NAMESPACE}/{key}/{ENTRY_NAME}")
        os.rmdir(f"{root}/{NAMESPACE}/{key}")
    peer = (time.perf_counter() - began) / part * 1e6
    limit = count - 2 * part
    flags = ["--capacity", str(4 * count * size), "--max-entries", str(limit), "--grace", "0"]
    with janitor(root, *flags, "--rate", "1000000") as (process, url, _):
        until(lambda: metric(url, "epd_store_entries") == limit)
        cost = metric(url, "epd_store_clearing_seconds_total") / part * 1e6
        memory = peak_mb(process.pid)
    return [
        Row(f"{part} entries cleared", cost, "us each", "a loop of unlink and rmdir", peer),
        Row("resident memory while clearing, peak", memory, "MB", "limit", LIMIT_MB, 1.0),
    ]


def fill(base: Path, count: int) -> int:
    """Makes entries of one row each; the bytes of one."""
    tensor = torch.zeros(1, 16)
    header = encode_header(tensor, fingerprint=FINGERPRINT, modality="image", metadata={})
    content = header + bytes(payload_view(tensor))
    base.mkdir()
    for number in range(count):
        directory = f"{base}/{key_of(number)}"
        os.mkdir(directory)
        descriptor = os.open(f"{directory}/{ENTRY_NAME}", os.O_WRONLY | os.O_CREAT, 0o660)
        os.write(descriptor, content)
        os.close(descriptor)
    return len(content)


def key_of(number: int) -> str:
    return f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}{number:048x}"


def probes(root: Path) -> tuple[float, float]:
    """Median time of a has-item check in us: of an entry that is there, and of one that is not."""
    root.mkdir(exist_ok=True)
    store, expected = FileStore(root, NAMESPACE, fsync=False), Expectation(FINGERPRINT, 1, 16)
    key = "a" * 64
    store.save(key, torch.zeros(1, 16), fingerprint=FINGERPRINT, modality="image", metadata={})

    def miss() -> None:
        try:
            store.probe("b" * 64, expected)
        except EntryMissing:
            pass

    times = timed(lambda: store.probe(key, expected)), timed(miss)
    shutil.rmtree(store.path(key).parent)
    return times


def timed(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(3000):
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples) * 1e6


@contextmanager
def janitor(root: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str, float]]:
    """A janitor that has looked at the store once, its address, and how long that took from its start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "epd-engine"), "store", "janitor", "--path", str(root)]
    began = time.perf_counter()
    process = subprocess.Popen([*command, "--port", str(port), *flags], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: answers(url))
        yield process, url, time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/usage", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def looks(url: str) -> float:
    return metric(url, "epd_store_looks_total")


def metric(url: str, name: str) -> float:
    for line in httpx.get(f"{url}/metrics", timeout=10).text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise KeyError(name)


def peak_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ValueError("no VmHWM")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 900
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("the janitor does not get there")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
