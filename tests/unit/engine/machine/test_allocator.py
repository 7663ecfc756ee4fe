"""Freed memory that stays with the process."""

import subprocess
import sys

FAULTS = """
import resource, threading, torch
{prepare}
def work():
    for _ in range(20):
        held = [torch.empty(3 << 20, dtype=torch.uint8).fill_(1) for _ in range(16)]
        del held
def run():
    work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def faults(prepare: str) -> int:
    code = FAULTS.format(prepare=prepare)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


def test_freed_memory_is_used_again_without_asking_the_kernel() -> None:
    told = faults("from epd_engine.machine.allocator import keep_freed_memory; keep_freed_memory()")
    assert told < 100
    assert faults("") > 10 * (told + 1), "the allocator keeps it by itself: the module has become useless"


GAPS = """
import psutil, torch
from epd_engine.machine.allocator import give_back_freed_memory, keep_freed_memory
keep_freed_memory()
def resident():
    return psutil.Process().memory_info().rss
blocks = [torch.empty(1 << 20, dtype=torch.uint8).fill_(1) for _ in range(256)]
blocks = blocks[::2]
before = resident()
give_back_freed_memory()
assert all(bool((block == 1).all()) for block in blocks)
print(before - resident())
"""


def test_gaps_between_what_stays_can_be_given_back() -> None:
    said = subprocess.run([sys.executable, "-c", GAPS], check=True, capture_output=True).stdout
    assert int(said) > 100 << 20
