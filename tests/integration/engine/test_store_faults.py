"""Entries that are altered, swapped or gone, and volumes that refuse, under real instances."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.digits import Reference, assert_same_tokens, shipped, user
from tests.support.engines import engine
from tests.support.epd_client import ask, ids, prime, rewritten, text
from tests.support.mounts import small_tmpfs
from tests.support.processes import Server, running

Messages = list[dict[str, Any]]


def entry_of(store: Path, key: str) -> Path:
    (path,) = store.glob(f"*/{key}/encoder_cache.safetensors")
    return path


def question(angle: float) -> Messages:
    """A picture that no other test has sent, so that no cache holds it."""
    return [user(shipped("seven").rotate(angle), "What digit is this?")]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def other_shape(path: Path) -> None:
    with safe_open(path, "pt") as file:
        said, tensor = file.metadata(), file.get_tensor("ec_cache")
    save_file({"ec_cache": tensor[:-1].contiguous()}, path, said)


def plain_tensor(path: Path) -> None:
    save_file({"ec_cache": torch.zeros(4, 4)}, path)


def delete(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()


DAMAGES: list[Callable[[Path], None]] = [truncate, flip_a_bit, other_shape, plain_tensor, delete]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_entry_is_a_miss_and_a_second_primer_mends_it(
    encoder: Server, pd: Server, store: Path, reference: Reference, damage: Callable[[Path], None]
) -> None:
    messages = question(10 + DAMAGES.index(damage))
    parts = prime(encoder, messages)
    damage(entry_of(store, parts[0]["uuid"]))
    missed = ask(pd, rewritten(messages, parts))
    assert missed.status_code == 503, missed.text
    assert missed.json()["error"]["code"] == "ec_miss"
    again = prime(encoder, messages)
    assert again == parts
    answer = ask(pd, rewritten(messages, again), return_token_ids=True)
    assert_same_tokens(ids(answer), reference.generate(messages, 12))


def test_the_answer_follows_the_stored_embeddings(encoder: Server, pd: Server, store: Path) -> None:
    """Swaps two entries: if the answers did not swap, the PD would not be using them."""
    size = (112, 112)
    pair = [
        [user(shipped(name).resize(size).rotate(4), "What digit is this?")] for name in ("seven", "three")
    ]
    before = [text(ask(pd, rewritten(m, prime(encoder, m)))) for m in pair]
    assert before[0] != before[1]
    fresh = [
        [user(shipped(name).resize(size).rotate(5), "What digit is this?")] for name in ("seven", "three")
    ]
    parts = [prime(encoder, m) for m in fresh]
    paths = [entry_of(store, p[0]["uuid"]) for p in parts]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)
    swapped = [text(ask(pd, rewritten(m, p))) for m, p in zip(fresh, parts, strict=True)]
    assert swapped == [before[1], before[0]]


def test_a_miss_leaves_no_directory_behind(encoder: Server, pd: Server, store: Path) -> None:
    """vllm#60820: a look-up that makes the item's directory looks like an entry to others."""
    messages = question(30)
    (part,) = prime(encoder, messages)
    before = sorted(store.rglob("*"))
    assert ask(pd, rewritten(messages, [{**part, "uuid": "c" * 64}])).status_code == 503
    assert sorted(store.rglob("*")) == before


def test_a_store_that_was_cleaned_is_filled_again_by_an_encoder_that_still_has_the_item(
    encoder: Server, pd: Server, store: Path
) -> None:
    messages = question(31)
    parts = prime(encoder, messages)
    encoded = encoder.metric("epd_engine_encoder_items_total")
    subprocess.run(["rm", "-rf", *map(str, store.iterdir())], check=True)
    assert prime(encoder, messages) == parts
    assert encoder.metric("epd_engine_encoder_items_total") == encoded
    assert ask(pd, rewritten(messages, parts)).status_code == 200


@pytest.fixture(scope="module")
def volume(folder: Path) -> Iterator[Path]:
    with small_tmpfs(folder / "volume", 256 * 1024) as path:
        yield path


@pytest.fixture(scope="module")
def on_volume(folder: Path, volume: Path) -> Iterator[Server]:
    encoder = engine("encoder-on-volume", folder, role="ec_producer", store=volume)
    with running(encoder):
        yield encoder


def test_a_read_only_volume_is_a_clear_error_and_the_encoder_lives(on_volume: Server, volume: Path) -> None:
    # The first test on this encoder: its lease file, once open, would keep the mount from being changed.
    subprocess.run(["mount", "-o", "remount,ro", str(volume)], check=True)
    try:
        answer = ask(on_volume, [user(shipped("seven").rotate(41))])
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(volume)], check=True)
    assert answer.status_code == 503
    assert "Read-only file system" in answer.json()["error"]["message"]
    assert httpx.get(f"{on_volume.url}/health").status_code == 200
    assert prime(on_volume, [user(shipped("seven").rotate(41))])


def test_a_full_volume_is_a_clear_error_and_the_encoder_lives(on_volume: Server, volume: Path) -> None:
    filler = volume / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(1 << 20))
    answer = ask(on_volume, [user(shipped("seven").rotate(40))])
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "ec_store_unavailable"
    assert "No space left" in answer.json()["error"]["message"]
    filler.unlink()
    assert prime(on_volume, [user(shipped("seven").rotate(40))])


def test_a_consumer_with_a_tower_computes_raw_media_and_uses_the_store_when_it_can(
    folder: Path, store: Path, encoder: Server, reference: Reference
) -> None:
    consumer = engine(
        "consumer-with-tower", folder, role="ec_consumer", store=store, extra=["--ec-miss", "compute"]
    )
    with running(consumer):
        stored, unknown = question(50), question(51)
        prime(encoder, stored)
        for messages, encoded in ((stored, 0), (unknown, 1)):
            answer = ask(consumer, messages, return_token_ids=True)
            assert_same_tokens(ids(answer), reference.generate(messages, 12))
            assert consumer.metric("epd_engine_encoder_items_total") == encoded
        # What it computes it does not publish: it is no producer.
        assert consumer.metric("epd_engine_ec_saves_total") == 0
        # A damaged entry of a raw item is no reason to fail: the pixels are at hand.
        damaged = question(52)
        flip_a_bit(entry_of(store, prime(encoder, damaged)[0]["uuid"]))
        answer = ask(consumer, damaged, return_token_ids=True)
        assert_same_tokens(ids(answer), reference.generate(damaged, 12))


def test_an_instance_in_both_roles_publishes_and_reads(folder: Path, store: Path, pd: Server) -> None:
    both = engine("both", folder, role="ec_both", store=store)
    with running(both):
        messages = question(60)
        answer = ask(both, messages)
        assert text(answer)
        assert both.metric("epd_engine_ec_saves_total") == 1
        ((key, said),) = answer.json()["ec_transfer_params"].items()
        part = {"type": "image_embeds", "image_embeds": said["metadata"], "uuid": key}
        assert text(ask(pd, rewritten(messages, [part]))) == text(answer)
