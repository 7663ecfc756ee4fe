"""The subcommands of `epd-engine store` and their help."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

EPILOG = """\
examples:
  epd-engine store stat /mnt/ec                     how full, by namespace; who is the janitor
  epd-engine store ls /mnt/ec --sort size           the largest entries
  epd-engine store cat-header /mnt/ec 3f9a          what the entry whose key begins so says of itself
  epd-engine store verify /mnt/ec                   read everything against its checksums; 1 if damaged
  epd-engine store gc /mnt/ec --capacity 8Gi --dry-run
  epd-engine store janitor --path /mnt/ec --capacity 8Gi --ttl 86400
"""
JANITOR_EPILOG = """\
example:
  epd-engine store janitor --path /mnt/ec --capacity 50Gi --high-water 0.9 --low-water 0.8 --ttl 86400

Once the store is above 45 Gi, the least recently used entries go until it is below 40 Gi; entries that
nobody used for a day go too. Entries that a reader leases never go. Writers keep within 50 Gi: they share
what is left, as the janitor reports it. GET /usage tells how full the store is, /metrics the rest.
"""


def add_store_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "store",
        help="look into an EC store, or keep it clean",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    listing = _add(actions, "ls", "list entries, the most recently used first")
    listing.add_argument("--namespace", help="only this one ('' for keys in the path itself)")
    listing.add_argument("--sort", choices=["used", "size"], default="used")
    listing.add_argument("--limit", type=_count, default=50, metavar="N", help="0 for all (default: 50)")
    listing.add_argument("--long", action="store_true", help="whole keys in the table")
    _add(actions, "stat", "how full the store is, by namespace; its janitor and its volume")
    checking = _add(actions, "verify", "read entries against their checksums")
    checking.add_argument("keys", nargs="*", metavar="KEY", help="an mm_hash or its beginning (all)")
    header = _add(actions, "cat-header", "show what an entry says of itself")
    header.add_argument("key", metavar="KEY", help="an mm_hash or its beginning")
    cleaning = _add(actions, "gc", "one pass of the janitor, where none runs")
    cleaning.add_argument("--dry-run", action="store_true", help="say what would go, and delete nothing")
    _add_limits(cleaning)
    _add_janitor(actions)


def run(arguments: argparse.Namespace) -> int:
    """The exit status."""
    from epd_engine.ec_store.cli import clean, inspect
    from epd_engine.ec_store.cli.survey import NoStore
    from epd_engine.ec_store.errors import StoreError
    from epd_engine.ec_store.janitor.lease import LeaseLost

    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "ls": inspect.ls,
        "stat": inspect.stat,
        "verify": inspect.verify,
        "cat-header": inspect.cat_header,
        "gc": clean.gc,
        "janitor": clean.janitor,
    }
    try:
        return actions[arguments.action](arguments)
    except BrokenPipeError:
        sys.stderr.close()  # as `head` does to us
        return 1
    except OSError as error:
        problem = f"{error.filename or arguments.path}: {error.strerror}"
    except (NoStore, StoreError, LeaseLost, ValueError) as error:
        problem = str(error)
    print(f"epd-engine store {arguments.action}: {problem}", file=sys.stderr)
    return 2


def _add(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("path", type=Path, metavar="PATH", help="the engines' shared_storage_path")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    return parser


def _add_janitor(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = actions.add_parser(
        "janitor",
        help="keep a store within its limits, until told to end",
        epilog=JANITOR_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--path", type=Path, metavar="DIR", help="the engines' shared_storage_path")
    add("--memory-path", type=Path, metavar="DIR", help="a tmpfs to clear of what dead processes left")
    _add_limits(parser)
    add("--interval", type=_seconds, default=10.0, metavar="SECONDS", help="between looks (default: 10)")
    add("--scrub", type=size, default=0, metavar="BYTES", help="payload to check, a second (default: none)")
    add("--index", type=Path, metavar="DIR", help="a local directory for scratch (default: a temporary one)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=9109, help="port to listen on (default: %(default)s)")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.set_defaults(check=lambda arguments: _check_janitor(parser, arguments))


def _check_janitor(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.path is None and arguments.memory_path is None:
        parser.error("at least one of --path and --memory-path is needed")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--capacity", type=size, metavar="BYTES", help="budget, also as 8Gi (default: 0.9 of the volume)")
    add("--high-water", type=float, default=0.9, metavar="SHARE", help="clear from here on (default: 0.9)")
    add("--low-water", type=float, default=0.8, metavar="SHARE", help="down to here (default: 0.8)")
    add("--ttl", type=_seconds, metavar="SECONDS", help="delete what was not used for so long (never)")
    add("--max-entries", type=_count, metavar="N", help="delete the oldest beyond so many (no limit)")
    add(
        "--grace",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="spare entries used within, and leftovers younger than this (default: 300)",
    )
    add(
        "--kv-ttl",
        type=_seconds,
        default=3600.0,
        metavar="SECONDS",
        help="delete KV between prefill and decode that is older (default: 3600)",
    )
    add("--rate", type=float, default=1000.0, metavar="N", help="operations a second (default: 1000)")


def size(text: str) -> int:
    """Bytes, also as `8Gi`, `500M`."""
    units = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    number = text.rstrip("kKMGTi")
    try:
        unit = units[text[len(number) :]]
        return int(number) * unit if number.isdecimal() else int(float(number) * unit)
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(f"must be bytes, such as 1000000 or 8Gi, got {text!r}") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return value
