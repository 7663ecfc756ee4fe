"""Both worker sides on real files: what is written is what is read, and nothing else is taken."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from epd_engine.attention.kv_cache import KVCache
from epd_engine.ec_store.kv_area import PULLED
from epd_engine.kv_transfer.base import KVConnectorOutput, KVConnectorRole
from epd_engine.kv_transfer.block_loader import BlockLoad
from epd_engine.kv_transfer.config import KVTransferConfig
from epd_engine.kv_transfer.shared_storage_connector import BlockPlan, BlockSave, SharedStorageKVConnector
from tests.support.kv_bench import BLOCK, IDENTITY

ID, DIGEST = "a" * 64, "d" * 64


class Side:
    """A worker side with a pool of its own."""

    def __init__(self, path: Path, identity: object = IDENTITY):
        config = KVTransferConfig(
            "SharedStorageKVConnector",
            "kv_both",
            kv_connector_extra_config={"shared_storage_path": str(path)},
        )
        self.connector = SharedStorageKVConnector(config, KVConnectorRole.WORKER, identity)  # type: ignore[arg-type]
        self.cache = KVCache(
            num_layers=3, num_blocks=16, block_size=BLOCK, kv_heads=2, head_dim=8,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        for keys, values in self.cache.layers:
            keys.normal_()
            values.normal_()
        self.connector.register_kv_caches(self.cache)

    def step(self, plan: BlockPlan, layers: int = 3) -> KVConnectorOutput:
        self.connector.bind_connector_metadata(plan)
        self.connector.start_load_kv()
        for layer in range(layers):
            self.connector.save_kv_layer(layer, frozenset(plan.saves))
        if layers == 3:
            self.connector.wait_for_save()
        output = self.connector.get_finished()
        self.connector.clear_connector_metadata()
        return output

    def until(self, done: Callable[[KVConnectorOutput], object]) -> KVConnectorOutput:
        for _ in range(2000):
            output = self.connector.get_finished()
            if done(output):
                return output
            time.sleep(0.005)
        raise AssertionError("nothing comes of it")

    def save(self, *block_ids: int, tokens_in_last: int = BLOCK) -> Path:
        save = BlockSave("p", ID, DIGEST, 0, block_ids, tokens_in_last, True)
        output = self.step(BlockPlan(saves={"p": save}))
        if not output.finished_sending:
            self.until(lambda o: o.finished_sending)
        (path,) = self.connector._base.glob("*/*.safetensors")
        return path

    def load(self, *block_ids: int, first: int = 0, digest: str = DIGEST) -> KVConnectorOutput:
        ends = (first + len(block_ids),)
        output = self.step(BlockPlan(loads=[BlockLoad("d", ID, digest, ends, first, block_ids)]))
        done = lambda o: o.finished_recving or o.failed_recving  # noqa: E731
        return output if done(output) else self.until(done)

    def blocks(self, *block_ids: int) -> torch.Tensor:
        return torch.stack([torch.stack([t[list(block_ids)] for t in layer]) for layer in self.cache.layers])


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    made = Side(tmp_path), Side(tmp_path)
    yield made
    for side in made:
        side.connector.shutdown()


def test_blocks_arrive_as_they_were(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    prefill.save(3, 1, 5)
    before = decode.blocks(*range(16))
    assert decode.load(7, 0, 2).finished_recving == {"d"}
    assert torch.equal(decode.blocks(7, 0, 2), prefill.blocks(3, 1, 5))
    others = [n for n in range(16) if n not in (7, 0, 2)]
    assert torch.equal(decode.blocks(*others), before[:, :, others]), "nothing else was touched"


def test_known_blocks_are_left_as_they_are(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    prefill.save(3, 1, 5)
    assert decode.load(9, 8, first=1).finished_recving == {"d"}
    assert torch.equal(decode.blocks(9, 8), prefill.blocks(1, 5))


def test_what_lies_behind_the_prompts_end_is_not_told(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    prefill.save(3, 1, tokens_in_last=3)
    decode.load(7, 0)
    got, wanted = decode.blocks(0), prefill.blocks(1)
    assert torch.equal(got[..., :3, :], wanted[..., :3, :])
    assert not got[..., 3:, :].any()


def test_any_safetensors_reader_reads_it(sides: tuple[Side, Side]) -> None:
    prefill, _ = sides
    path = prefill.save(3, 1)
    assert path.name == "000000-000002.safetensors"
    with safe_open(path, "pt") as file:
        layers = torch.stack([file.get_tensor(f"layer.{n}") for n in range(3)])
    assert torch.equal(layers, prefill.blocks(3, 1))
    assert path.stat().st_mode & 0o7777 == 0o660
    assert path.parent.stat().st_mode & 0o7777 == 0o2770


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(64))


def huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def flipped_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)


def other_checksum(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(b"checksums") + 14
    path.write_bytes(data[:at] + b"0" * 20 + data[at + 20 :])


def fewer_checksums(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(b"checksums") + 12
    assert data[at + 32 : at + 33] == b" "
    path.write_bytes(data[: at + 32] + b"0" + data[at + 33 :])


def a_link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def nothing(path: Path) -> None:
    path.unlink()


DAMAGES: list[Callable[[Path], None]] = [torn, longer, huge, flipped, flipped_header, other_checksum]
DAMAGES += [fewer_checksums, a_link, a_directory, nothing]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_file_that_is_not_whole_is_a_miss(sides: tuple[Side, Side], damage: Callable[[Path], None]) -> None:
    prefill, decode = sides
    damage(prefill.save(3, 1))
    assert list(decode.load(7, 0).failed_recving) == ["d"]


def test_another_prompts_kv_is_a_miss(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    prefill.save(3, 1)
    assert "another prompt's" in decode.load(7, 0, digest="e" * 64).failed_recving["d"]


def test_another_models_kv_is_a_miss(sides: tuple[Side, Side], tmp_path: Path) -> None:
    prefill, _ = sides
    prefill.save(3, 1)
    other = Side(tmp_path, IDENTITY.__class__(**{**vars(IDENTITY), "fingerprint": "f" * 16 + "0" * 48}))
    assert "another model's" in other.load(7, 0).failed_recving["d"]
    other.connector.shutdown()


def test_a_transfer_that_is_not_there_is_a_miss(sides: tuple[Side, Side]) -> None:
    assert "not there" in sides[1].load(7, 0).failed_recving["d"]


def test_what_is_taken_outlives_the_lease_and_can_be_loaded_again(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    directory = prefill.save(3, 1).parent
    decode.load(7, 0)
    prefill.step(BlockPlan(drops=[ID]))
    prefill.connector._saver.close()
    assert directory.with_name(ID + PULLED).is_dir()
    assert decode.load(4, 6).finished_recving == {"d"}
    assert torch.equal(decode.blocks(4, 6), prefill.blocks(3, 1))


@pytest.mark.parametrize("taken", [True, False])
def test_a_release_leaves_nothing(sides: tuple[Side, Side], taken: bool) -> None:
    prefill, decode = sides
    prefill.save(3, 1)
    if taken:
        decode.load(7, 0)
    decode.step(BlockPlan(releases=[ID]))
    decode.connector.shutdown()
    assert list(prefill.connector._base.iterdir()) == []


def test_a_step_that_fails_between_two_layers_leaves_nothing(sides: tuple[Side, Side]) -> None:
    prefill, _ = sides
    prefill.step(BlockPlan(saves={"p": BlockSave("p", ID, DIGEST, 0, (3, 1), BLOCK, True)}), layers=2)
    prefill.step(BlockPlan(drops=[ID]))
    prefill.connector.shutdown()
    assert list(prefill.connector._base.iterdir()) == []


def test_a_volume_that_refuses_fails_that_transfer_alone(sides: tuple[Side, Side], tmp_path: Path) -> None:
    prefill, _ = sides
    (prefill.connector._base / ID).write_text("in the way")
    output = prefill.step(BlockPlan(saves={"p": BlockSave("p", ID, DIGEST, 0, (3,), BLOCK, True)}))
    if not output.failed_sending:
        output = prefill.until(lambda o: o.failed_sending)
    assert list(output.failed_sending) == ["p"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_range_that_failed_is_not_made_good_by_later_ones(sides: tuple[Side, Side]) -> None:
    prefill, _ = sides
    blocker = prefill.connector._base / ID
    blocker.write_text("in the way")
    first = BlockSave("p", ID, DIGEST, 0, (3,), BLOCK, False)
    output = prefill.step(BlockPlan(saves={"p": first}))
    if not output.failed_sending:
        prefill.until(lambda o: o.failed_sending)
    blocker.unlink()
    output = prefill.step(BlockPlan(saves={"p": BlockSave("p", ID, DIGEST, 1, (1,), BLOCK, True)}))
    prefill.connector._saver.close()
    assert not output.finished_sending
    assert not prefill.connector.get_finished().finished_sending


def test_what_dead_instances_left_is_swept_and_what_is_young_or_foreign_stays(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    prefill, _ = sides
    base = prefill.connector._base
    old, taken, young, foreign = (base / n for n in ("b" * 64, "c" * 64 + PULLED, "e" * 64, "notes"))
    for path in (old, taken, young, foreign):
        path.mkdir()
        (path / "file").write_text("x")
    for path in (old, taken, foreign):
        os.utime(path, (1, 1))
    prefill.connector._sweep_due = 0.0
    prefill.connector.get_finished()
    prefill.connector.shutdown()
    assert sorted(base.iterdir()) == sorted([young, foreign])
