"""Worker processes that wait for a word, do one pass of one operation, and say when it began and ended.

Both ends: `serve` in the worker, which may run another environment's Python, and `Crew` in the benchmark. No
imports beyond the standard library.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

Handler = Callable[..., Any]


def median_seconds(function: Callable[[int], object], entries: int, repeat: int) -> float:
    """Of one call, over `repeat` passes through all entries: one that lost its processor does not count."""
    seconds = []
    for _ in range(repeat):
        for index in range(entries):
            began = time.perf_counter()
            function(index)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answers commands `[name, arguments]`, a JSON document a line, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not mix with the answers
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        began = time.monotonic()
        answer = handlers[name](**arguments)
        print(json.dumps([answer, began, time.monotonic()]), file=answers, flush=True)


class Crew:
    """Workers of one kind that do the same thing at the same time."""

    def __init__(self, command: Sequence[str | Path], count: int, environment: Mapping[str, str]):
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environment)
            )
            for _ in range(count)
        ]

    def __enter__(self) -> "Crew":
        for process in self._processes:
            self._read(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            with process:
                assert process.stdin is not None
                process.stdin.close()

    def __len__(self) -> int:
        return len(self._processes)

    def do(self, name: str, count: int | None = None, **arguments: Any) -> list[Any]:
        """The answers of `count` workers (None: all)."""
        return [answer for answer, _, _ in self._all(name, count, arguments)]

    def rate(self, count: int, operation: str, entries: int, repeat: int) -> float:
        """Entries a second of `count` workers together.

        A lone one's by the median of its calls, several ones' from the first begin to the last end.
        """
        answers = self._all("run", count, {"operation": operation, "repeat": repeat})
        if count == 1:
            return 1 / float(answers[0][0])
        seconds = max(ended for *_, ended in answers) - min(began for _, began, _ in answers)
        return float(count * entries * repeat / seconds)

    def _all(self, name: str, count: int | None, arguments: Mapping[str, Any]) -> list[Any]:
        asked = self._processes[:count]
        line = json.dumps([name, arguments])
        for process in asked:
            assert process.stdin is not None
            print(line, file=process.stdin, flush=True)
        return [json.loads(self._read(process)) for process in asked]

    @staticmethod
    def _read(process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a worker ended; its error is above")
        return line
