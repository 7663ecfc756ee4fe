"""Whether a consumer's memory grows with the number of entries that it has loaded and dropped."""

import shutil
from pathlib import Path

import torch
from ec_store_worker import arena, put, save
from ec_store_workers import Crew
from report import Row

from epd_engine.ec_store.file_store import FileStore

SHAPE = (256, 2048)
BATCH = 25  # entries that exist at one time
WARM, CYCLES = 100, 1000
ROOM = 1024  # entries' room in the arena, of which a fraction is ever taken
MEGA = 1e6


def resident(crew: Crew, memory: Path, files: Path) -> list[Row]:
    """The resident bytes of one process after all cycles, against those after the first ones."""
    tensor = torch.randn(SHAPE).bfloat16()
    writer = arena(memory / "consumed", *SHAPE, ROOM, checksums=True)
    seen: dict[str, list[int]] = {"memory": [], "files": []}
    for begin in range(0, CYCLES, BATCH):
        keys = [f"{begin + index:064x}" for index in range(BATCH)]
        for index, key in enumerate(keys):
            put(writer, index, key, tensor)
        seen["memory"] += consumed(crew, "arena", writer.path.parent, keys)
        for key in keys:
            writer.retire(key)
    for begin in range(0, CYCLES, BATCH):
        keys = [f"{begin + index:064x}" for index in range(BATCH)]
        store = FileStore(files, "files", fsync=False)
        for key in keys:
            save(store, key, tensor)
        seen["files"] += consumed(crew, "file", files, keys)
        shutil.rmtree(files / "files")
    writer.close()
    return [
        Row(
            f"resident memory after {CYCLES} loads, {form}",
            values[-1] / MEGA,
            "MB",
            f"after {WARM}",
            values[WARM // BATCH - 1] / MEGA,
            0.99,
        )
        for form, values in seen.items()
    ]


def consumed(crew: Crew, form: str, directory: Path, keys: list[str]) -> list[int]:
    answers: list[int] = crew.do(
        "consume", 1, form=form, directory=str(directory), keys=keys, rows=SHAPE[0], width=SHAPE[1]
    )
    return answers
