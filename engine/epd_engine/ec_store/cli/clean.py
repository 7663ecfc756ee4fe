"""`gc` and `janitor`."""

import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from threading import Event

from epd_engine.ec_store.cli.output import print_json, size
from epd_engine.ec_store.cli.survey import NoStore, check_store
from epd_engine.ec_store.credit import read_report
from epd_engine.ec_store.janitor.index import Index
from epd_engine.ec_store.janitor.keeper import Keeper
from epd_engine.ec_store.janitor.lease import LeaseHeld, StoreLease
from epd_engine.ec_store.janitor.limits import Limits
from epd_engine.ec_store.janitor.pace import Pace


def limits(arguments: Namespace) -> Limits:
    """Raises ValueError in terms of the flags."""
    return Limits(
        capacity=arguments.capacity,
        high_water=arguments.high_water,
        low_water=arguments.low_water,
        ttl=arguments.ttl,
        max_entries=arguments.max_entries,
        grace=arguments.grace,
        rate=arguments.rate,
        scrub=getattr(arguments, "scrub", 0),
        kv_ttl=arguments.kv_ttl,
    )


def gc(arguments: Namespace) -> int:
    """One pass of the janitor, under its lease."""
    root = check_store(arguments.path)
    bounds = limits(arguments)
    lease = StoreLease(root)
    try:
        lease.acquire()
    except LeaseHeld as held:
        raise NoStore(f"{held}; it does this by itself") from held
    try:
        with tempfile.TemporaryDirectory(prefix="epd-gc-") as scratch:
            index = Index(Path(scratch) / "index.sqlite")
            keeper = Keeper(root, bounds, lease, index, Pace(bounds.rate, Event()))
            # A report where there was none would bind writers to a janitor that does not run.
            publish = not arguments.dry_run and read_report(root) is not None
            cleared = keeper.cycle(publish=publish, dry_run=arguments.dry_run)
            index.close()
    finally:
        lease.release()
    usage = keeper.usage
    assert usage is not None
    freed, gone = sum(cleared.bytes.values()), sum(cleared.entries.values())
    if arguments.json:
        print_json(
            {
                "dryRun": arguments.dry_run,
                "entriesDeleted": dict(cleared.entries),
                "bytesDeleted": dict(cleared.bytes),
                "leased": cleared.leased,
                "refused": cleared.refused,
                "leftoversDeleted": dict(+keeper.totals.removed),
                "bytes": usage.bytes,
                "entries": usage.entries,
                "capacity": usage.capacity,
            }
        )
        return 0
    verb = "would delete" if arguments.dry_run else "deleted"
    print(f"{verb} {gone} entries, {size(freed)}" + (f" ({_reasons(cleared.entries)})" if gone else ""))
    if cleared.leased:
        print(f"spared {cleared.leased} entries that are being read")
    if keeper.totals.removed.total():
        print(f"removed what was left behind: {_reasons(keeper.totals.removed)}")
    print(f"{usage.entries} entries, {size(usage.bytes)} of {size(usage.capacity)}")
    return 0


def janitor(arguments: Namespace) -> int:
    """The janitor's process. Returns when told to end."""
    from epd_engine import logs
    from epd_engine.ec_store.janitor.http import listening
    from epd_engine.ec_store.janitor.service import Service

    logs.configure(arguments.log_level)
    if arguments.path is not None:
        arguments.path.mkdir(parents=True, exist_ok=True)
    if arguments.index is not None:
        arguments.index.mkdir(parents=True, exist_ok=True)
    service = Service(
        arguments.path, arguments.memory_path, limits(arguments), arguments.interval, arguments.index
    )
    with listening(service, arguments.host, arguments.port):
        service.run()
    return 0


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} by {reason}" for reason, count in sorted(counts.items()) if count)
