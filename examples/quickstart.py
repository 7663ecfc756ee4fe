"""One encoder, one PD instance and a proxy on this machine, and one picture asked about.

Does what a person would do: `epd up -d`, `examples/ask.py`, and `epd down` at the end.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
EPD = Path(sys.executable).with_name("epd")
NAME = "quickstart"
PICTURE = HERE / "images" / "seven.png"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--oneshot", action="store_true", help="end after the answer; exit status 0 only if it is right"
    )
    oneshot = parser.parse_args().oneshot
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A proxy for the internet is none for this machine.
    os.environ["NO_PROXY"] = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
    try:
        if status := run_to_end("up", "-d", "-f", str(HERE / "digits.yaml"), "--name", NAME, "--port", "0"):
            return status
        try:
            return serve(oneshot)
        finally:
            run_to_end("down", "--name", NAME)
    except KeyboardInterrupt:
        return 130 if oneshot else 0


def run_to_end(*arguments: str) -> int:
    """Runs `epd`; if interrupted, not before it has cleaned up behind itself."""
    with subprocess.Popen([EPD, *arguments]) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise


def serve(oneshot: bool) -> int:
    """Asks, says how to ask again, and waits for Ctrl-C: the exit status."""
    listing = subprocess.run(
        [EPD, "ps", "--name", NAME, "--json"], capture_output=True, text=True, check=True
    )
    url = f"{json.loads(listing.stdout)[0]['address']}/v1"
    ask = [shown(sys.executable), shown(HERE / "ask.py"), "--url", url]
    print(flush=True)
    asked = subprocess.run([*ask, shown(PICTURE)], stdout=subprocess.PIPE, text=True, check=False)
    print(asked.stdout)
    answer = asked.stdout.rpartition("answer")[2].strip().lower().rstrip(".")
    right = asked.returncode == 0 and answer == PICTURE.stem
    if not right:
        print(f"That is not right: {PICTURE.stem!r} was expected.", flush=True)
    if oneshot:
        return 0 if right else 1
    print(f"Ask again, from another terminal:\n  {' '.join(ask)} PICTURE...")
    print(f"or with any OpenAI client at {url}")
    print(f"What the engines say:  epd logs --name {NAME}\n\nServing until Ctrl-C.", flush=True)
    signal.pause()
    return 0


def shown(path: Path | str) -> str:
    """A path as short as it can be from where the person stands."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
