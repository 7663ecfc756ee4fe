"""`ls`, `stat`, `verify`, `cat-header`."""

import heapq
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epd_engine.ec_store.check import check_file
from epd_engine.ec_store.cli.output import age, print_json, print_table, size
from epd_engine.ec_store.cli.survey import Place, check_store, find, places
from epd_engine.ec_store.credit import read_report
from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.header import PlainHeader
from epd_engine.ec_store.janitor import scan
from epd_engine.ec_store.janitor.lease import StoreLease
from epd_engine.ec_store.layout import QUARANTINE_DIRECTORY

NS = 1_000_000_000


def ls(arguments: Namespace) -> int:
    """Entries, the most recently used first."""
    root = check_store(arguments.path)
    limit = arguments.limit or 1 << 62
    total, now = Counter[str](), time.time()

    def seen() -> Iterator[tuple[int, int, Place]]:
        for place in places(root, arguments.namespace):
            found = scan.look(place.base, place.key)
            if found is not None:
                total["entries"] += 1
                total["bytes"] += found.bytes
                yield found.used, found.bytes, place

    order = (lambda row: row[1]) if arguments.sort == "size" else (lambda row: row[0])
    shown = [_listed(*row, now) for row in heapq.nlargest(min(limit, 1 << 24), seen(), key=order)]
    if arguments.json:
        print_json({**total, "shown": len(shown), "list": shown})
        return 0
    rows = [
        [
            row["namespace"] or "(bare)",
            row["key"] if arguments.long else row["key"][:16],
            "x".join(map(str, row["shape"])) if row["shape"] else "-",
            row["dtype"] or "-",
            row["modality"] or "-",
            size(row["bytes"]),
            age(row["usedSecondsAgo"]),
            row["state"],
        ]
        for row in shown
    ]
    head = ["NAMESPACE", "KEY", "SHAPE", "DTYPE", "MODALITY", "SIZE", "USED AGO", "STATE"]
    print_table(head, rows, right=(2, 5, 6))
    more = (
        f", {total['entries'] - len(shown)} not shown (--limit 0: all)"
        if total["entries"] > len(shown)
        else ""
    )
    print(f"{total['entries']} entries, {size(total['bytes'])}{more}")
    return 0


def stat(arguments: Namespace) -> int:
    """The store as a whole."""
    root = check_store(arguments.path)
    names: dict[str, Counter[str]] = {}
    for place in places(root):
        count = names.setdefault(place.namespace, Counter())
        found = scan.look(place.base, place.key)
        if found is not None:
            count["entries"] += 1
            count["bytes"] += found.bytes
        else:
            left = scan.leftovers(place.base, place.key) or []
            count["unfinished"] += 1
            count["unfinishedBytes"] += sum(file.bytes for file in left)
    volume = os.statvfs(root)
    report = read_report(root)
    document: dict[str, Any] = {
        "path": str(root),
        "entries": sum(count["entries"] for count in names.values()),
        "bytes": sum(count["bytes"] for count in names.values()),
        "namespaces": {name: dict(count) for name, count in sorted(names.items())},
        "quarantined": len(_quarantined(root)),
        "volumeBytes": volume.f_blocks * volume.f_frsize,
        "volumeFreeBytes": volume.f_bavail * volume.f_frsize,
        "janitor": StoreLease(root).holder(),
        "report": None if report is None else asdict(report),
    }
    if arguments.json:
        print_json(document)
        return 0
    rows = [
        [name or "(bare)", str(count["entries"]), size(count["bytes"]), str(count["unfinished"])]
        for name, count in sorted(names.items())
    ]
    print_table(["NAMESPACE", "ENTRIES", "SIZE", "UNFINISHED"], rows, right=(1, 2, 3))
    free = f"{size(document['volumeFreeBytes'])} free of {size(document['volumeBytes'])}"
    print(f"{document['entries']} entries, {size(document['bytes'])}; the volume has {free}")
    print(f"{document['quarantined']} damaged entries in {root / QUARANTINE_DIRECTORY}")
    print(f"janitor: {document['janitor'] or 'none'}")
    if report is not None:
        since = age(time.time() - report.time)
        print(
            f"its last report, {since} ago: {size(report.used)} of {size(report.budget)} used, "
            f"{len(report.writers)} writers may write {size(report.credit)} each"
        )
    return 0


def verify(arguments: Namespace) -> int:
    """Every entry, or those named, read against its checksum. 1 where one is damaged."""
    root = check_store(arguments.path)
    chosen = [find(root, key) for key in arguments.keys] if arguments.keys else places(root)
    counts, damaged = Counter[str](), []
    for place in chosen:
        try:
            header = check_file(place.path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # a save at work, or deleted meanwhile
        except (EntryDamaged, OSError) as error:
            counts["damaged"] += 1
            damaged.append({"namespace": place.namespace, "key": place.key, "problem": str(error)})
        else:
            counts["whole" if header.checksum else "without checksum"] += 1
    if arguments.json:
        print_json({"whole": counts["whole"], "unchecked": counts["without checksum"], "damaged": damaged})
    else:
        if damaged:
            rows = [[row["namespace"] or "(bare)", row["key"], row["problem"]] for row in damaged]
            print_table(["NAMESPACE", "KEY", "PROBLEM"], rows)
        print(", ".join(f"{counts[n]} {n}" for n in ("whole", "without checksum", "damaged")))
    return 1 if damaged else 0


def cat_header(arguments: Namespace) -> int:
    """What one entry says of itself."""
    place = find(check_store(arguments.path), arguments.key)
    header = scan.read_header(place.path)
    document = {"namespace": place.namespace, "key": place.key, **_described(header)}
    if arguments.json:
        print_json(document)
    else:
        print_table(["FIELD", "VALUE"], [[name, str(value)] for name, value in document.items()])
    return 0


def _listed(used: int, count: int, place: Place, now: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "namespace": place.namespace,
        "key": place.key,
        "bytes": count,
        "usedSecondsAgo": round(now - used / NS, 3),
        "shape": None,
        "dtype": None,
        "modality": None,
    }
    try:
        header = scan.read_header(place.path)
    except (EntryDamaged, OSError) as error:
        return {**row, "state": "damaged", "problem": str(error)}
    state = "foreign" if header.foreign else "ok"
    return {
        **row,
        "shape": list(header.shape),
        "dtype": header.dtype_name,
        "modality": header.modality,
        "state": state,
    }


def _described(header: PlainHeader) -> dict[str, Any]:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(header.created))
    return {
        "shape": list(header.shape),
        "dtype": header.dtype_name,
        "payloadBytes": header.payload_bytes,
        "modality": header.modality,
        "placeholder": dict(header.metadata),
        "modelFingerprint": header.fingerprint,
        "created": when if header.created else None,
        "checksum": header.checksum or None,
        "foreign": header.foreign,
    }


def _quarantined(root: Path) -> list[str]:
    try:
        return os.listdir(root / QUARANTINE_DIRECTORY)
    except FileNotFoundError:
        return []
