"""Running commands so that a failure says what was run and what it printed."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_LINES = 40
POLL_S = 0.05
LONG_POLL_S = 0.25
_STARTED = time.monotonic()

Word = str | Path
"""Of a command line."""


class ClusterError(RuntimeError):
    """Something that should have worked did not."""


class Unavailable(ClusterError):
    """This machine, or this kind of cluster, cannot do what is asked for. Tests are then skipped."""


def progress(text: str) -> None:
    """One line for the person who waits."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, or a note that there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def run(
    command: Sequence[Word],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> str:
    """Runs a short command; its standard output. Raises with everything it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        printed = "\n".join((done.stdout + done.stderr).splitlines()[-TAIL_LINES:])
        raise ClusterError(f"{' '.join(words)}: exit status {done.returncode}\n{printed}")
    return done.stdout


def run_long(
    command: Sequence[Word],
    log: Path,
    what: str,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    report_every_s: float = 30.0,
) -> None:
    """Runs a command that takes minutes, its output in a log, with a line of progress now and then."""
    progress(f"{what} ...")
    began = reported = time.monotonic()
    with log.open("ab") as file:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                time.sleep(LONG_POLL_S)
                if time.monotonic() - reported >= report_every_s:
                    reported = time.monotonic()
                    last = tail(log, 1).strip()[:80]
                    progress(f"{what} ... {reported - began:.0f} s so far: {last}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise ClusterError(f"{what}: exit status {process.returncode}\n{tail(log)}")
    progress(f"{what}: done in {time.monotonic() - began:.0f} s")
