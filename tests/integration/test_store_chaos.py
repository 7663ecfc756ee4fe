"""The EC store under chaos: killed and stopped processes, full volumes, lost permissions, flipped bits.

Eight writers and eight readers of files, and a few of memory and of both tiers, each a process of its own
user with the volume's group, their janitors, and small budgets; SIGKILL and SIGSTOP at random moments of any
of them. What must hold: a read is exact or a clean miss; nothing hangs; the budget holds, give or take one
entry a writer; no entry goes under a live lease; and at rest nothing is left that no ledger knows.

The faults are a function of the seed. `EPD_CHAOS_SECONDS=600 EPD_CHAOS_SEED=7 pytest <this file>` is a soak.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import store_audit as audit
from tests.support.mounts import small_tmpfs
from tests.support.store_chaos import GID, GRACE, LEASE_SECONDS, Chaos, Form
from tests.support.store_faults import Volume
from tests.support.store_items import MAX_ENTRY_BYTES, NAMESPACE
from tests.support.waiting import eventually

SECONDS = float(os.environ.get("EPD_CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("EPD_CHAOS_SEED", "20"))
MIB = 1 << 20
SHORT_LEASE_SECONDS = 0.7

CREW = {"kill": 30, "stop": 12, "full": 3, "forbid": 12}  # a minute
JANITOR = {"kill-janitor": 2, "stop-janitor": 3}
FLIPS = {"flip": 60}
FILES = Form(
    "files",
    "ECSharedStorageConnector",
    8,
    8,
    240,
    CREW | JANITOR | FLIPS,
    budget=16 * MIB,
    holds=True,
)
# Without checksums, as is the default: only generations stand between a reader and a torn entry.
MEMORY = Form("memory", "ECSharedMemoryConnector", 3, 3, 60, CREW | JANITOR, holds=True)
TIERS = Form("tiers", "ECTieredConnector", 2, 3, 120, CREW | JANITOR | FLIPS, budget=10 * MIB)

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts and users need root"),
    pytest.mark.timeout(int(SECONDS) + 420),
]


@pytest.fixture(scope="module")
def chaos() -> Iterator[dict[str, Chaos]]:
    """All forms after their time under chaos, every worker ended, the janitors at work."""
    print(f"EPD_CHAOS_SEED={SEED} EPD_CHAOS_SECONDS={SECONDS:g}")
    with ExitStack() as stack:
        # Not pytest's own directory: that is closed to other users.
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-chaos-")))
        home.chmod(0o755)
        forms = {form.name: _chaos(form, home, stack) for form in (FILES, MEMORY, TIERS)}
        for form in forms.values():
            stack.callback(form.kill_all)
        for form in forms.values():
            form.janitor.start()  # without a report of its there is no budget
        for form in forms.values():
            eventually(lambda form=form: form.janitor.is_ready, 120)  # type: ignore[misc]
            form.start()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for form in forms.values():
                form.tick()
            time.sleep(0.02)
        for form in forms.values():
            form.finish()
        yield forms


def _chaos(form: Form, home: Path, stack: ExitStack) -> Chaos:
    def volume(name: str, size: int) -> Volume:
        root = stack.enter_context(small_tmpfs(home / f"{form.name}-{name}", size))
        os.chown(root, 0, GID)
        root.chmod(0o2770)
        return Volume(root)

    files = volume("files", 3 * form.budget) if form.budget else None
    memory = None if form is FILES else volume("memory", 64 * MIB)

    def extra(n: int) -> dict[str, Any]:
        in_files = {"shared_storage_path": str(files and files.root), "lease_seconds": LEASE_SECONDS}
        in_memory = {"path": str(memory and memory.root), "capacity": (2 if form is MEMORY else 6) * MIB}
        # Some leases are shorter than a reader's worst pause, so that only what it read tells it the truth.
        in_memory |= {"lease_seconds": SHORT_LEASE_SECONDS if n % 3 else LEASE_SECONDS}
        if form is FILES:
            return in_files | {"fsync": n % 2 == 0}
        if form is MEMORY:
            return in_memory
        write = "back" if n == 1 else "through"
        return {"storage": in_files, "memory": in_memory | {"verify": "always"}, "write": write}

    first_uid = 54100 + 100 * (FILES, MEMORY, TIERS).index(form)
    return Chaos(form, SEED, SECONDS, home / f"{form.name}-control", extra, files, memory, first_uid)


every_form = pytest.mark.parametrize("name", ["files", "memory", "tiers"])
forms_with_memory = pytest.mark.parametrize("name", ["memory", "tiers"])
forms_with_files = pytest.mark.parametrize("name", ["files", "tiers"])


class TestAfterChaos:
    @every_form
    def test_nothing_was_violated(self, chaos: dict[str, Chaos], name: str) -> None:
        found = chaos[name].violations()
        account = "\n".join(json.dumps(one, indent=1) for one in found[:5])
        assert not found, f"seed {SEED}, {len(found)} violations, the first of them:\n{account}"

    @every_form
    def test_all_of_it_took_place(self, chaos: dict[str, Chaos], name: str) -> None:
        """Otherwise the rest has proved nothing."""
        form = chaos[name]
        totals = form.totals
        print(name, dict(sorted(totals.items())), f"peak {form.peak} of {form.form.budget}")
        missing = [
            what
            for what in ("loaded", "missed", "saved", "killed", "stopped", "full")
            if not totals[what] and what in {"loaded", "missed", "saved", *form.form.rates} | {"killed"}
        ]
        assert not missing, totals
        assert form.janitor.killed, "the janitor was never killed"
        assert any(what.startswith("forbid") for what in totals), totals
        assert form.form.budget == 0 or form.samples > SECONDS

    @forms_with_memory
    def test_no_memory_of_the_dead_remains(self, chaos: dict[str, Chaos], name: str) -> None:
        memory = chaos[name].memory
        assert memory is not None
        eventually(lambda: not audit.arenas(memory.root), 60)

    @every_form
    def test_the_files_of_dead_leases_are_swept(self, chaos: dict[str, Chaos], name: str) -> None:
        time.sleep(LEASE_SECONDS)
        for volume in chaos[name].volumes:
            audit.age_leases(volume.root)
            eventually(lambda root=volume.root: not audit.lease_files(root), 60)  # type: ignore[misc]

    @forms_with_files
    def test_bytes_on_disk_are_those_of_the_ledger(self, chaos: dict[str, Chaos], name: str) -> None:
        form = chaos[name]
        assert form.files is not None
        root = form.files.root

        def agree() -> bool:
            found, report, usage = audit.walk(root, ()), audit.report_of(root), form.janitor.usage()
            quiet = report is not None and found.temporaries == 0 and usage.get("isJanitor", False)
            return quiet and found.total == report.used == usage["bytes"] and found.entries == report.entries

        eventually(agree, 60)
        assert audit.walk(root, ()).total <= form.form.budget + form.form.writers * MAX_ENTRY_BYTES
        assert form.janitor.end() == 0
        limits = ("--capacity", str(form.form.budget), "--grace", str(GRACE))
        cleaned, stat = audit.store("gc", root, *limits), audit.store("stat", root)
        found = audit.walk(root, ())
        assert cleaned["bytes"] == found.total
        assert stat["bytes"] + found.quarantined == cleaned["bytes"]
        assert stat["entries"] == cleaned["entries"] == found.entries
        assert stat["janitor"] is None
        assert found.total <= form.form.budget

    @forms_with_files
    def test_only_what_was_damaged_on_purpose_is_damaged(self, chaos: dict[str, Chaos], name: str) -> None:
        form = chaos[name]
        assert form.files is not None
        said = audit.store("verify", form.files.root, status=(0, 1))
        assert {one["key"] for one in said["damaged"]} <= form.damaged
        assert audit.quarantined(form.files.root) <= form.damaged
        assert said["unchecked"] == 0
        assert set(audit.store("stat", form.files.root)["namespaces"]) <= {"", NAMESPACE}
