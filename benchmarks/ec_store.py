"""How fast the EC store loads and saves, against the machine's own limits and vLLM's file connector.

Loads end in a warm CPU buffer, in one and in four processes at once; saves come from one process. Each row's
peer was measured in the same rounds, over as many distinct tensors of the same size; the best round counts.
vLLM's rows need its environment, which `--vllm` installs (minutes, 2.5 GB).

    .venv/bin/python benchmarks/ec_store.py [--quick] [--vllm] [--json FILE] [--memory DIR] [--directory DIR]
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from report import print_table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ec_store_look_ups import look_ups
from ec_store_memory import resident
from ec_store_speed import Crews, Size, speed

from tests.support.vllm import installed_python, vllm_python

SHAPES = ((256, 2048), (1024, 3584), (16384, 3584))


class Extent(NamedTuple):
    """How much is measured."""

    size: Size
    vllm_workers: int
    entries: int
    """In the larger of the stores that are looked into."""


FULL = Extent(Size(rounds=7, pass_bytes=192 << 20, distinct_bytes=192 << 20), 4, 100_000)
QUICK = Extent(Size(rounds=2, pass_bytes=64 << 20, distinct_bytes=64 << 20), 1, 5_000)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, 5000 entries, one process of vLLM"
    )
    parser.add_argument("--vllm", action="store_true", help="install vLLM if it is not there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--memory", type=Path, default="/dev/shm", metavar="DIR", help="on a tmpfs")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="for files; the system's temporary one")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    extent = QUICK if options.quick else FULL
    python = vllm_python() if options.vllm else installed_python()
    if python is None:
        print("vLLM is not installed: no rows of its connector; --vllm installs it", file=sys.stderr)
    with ExitStack() as stack:
        memory, files = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-ec-store-", dir=directory)))
            for directory in (options.memory, options.directory)
        )
        crews = Crews.start(stack, python, extent.vllm_workers)
        rows = [row for shape in SHAPES for row in speed(crews, *shape, extent.size, memory, files)]
        rows += look_ups(files, memory, extent.entries)
        rows += resident(crews.ours, memory, files)
    print_table(rows)
    if options.json:
        write_json(rows, options.json)


if __name__ == "__main__":
    main()
