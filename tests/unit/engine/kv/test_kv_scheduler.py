"""Prefill and decode as schedulers see them: no model, no clock, no thread, no file."""

import random

import pytest

from epd_engine.core.remote_kv import RemoteDecode, RemoteKV
from epd_engine.core.request import FinishReason, RequestError, RequestStatus
from tests.support.engine_objects import item
from tests.support.kv_bench import BLOCK, KVBench, Volume, handed_on

PICTURE = [item("a", 2, 5, pixels=True)]


def prefilled(volume: Volume, length: int, salt: str = "", **bench: int) -> RemoteKV:
    prefill = KVBench(volume, **bench)
    prefill.add("p", length, RemoteDecode(), media=PICTURE if length > 8 else None, salt=salt)
    prefill.run()
    prefill.assert_at_rest()
    assert prefill.told["p"] == [100 + length]
    return handed_on(prefill, "p")


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 41])
@pytest.mark.parametrize("tokens", [3, 16, 64])
def test_decode_goes_on_from_the_first_token_and_computes_no_prompt(length: int, tokens: int) -> None:
    volume: Volume = {}
    kv = prefilled(volume, length, tokens=tokens)
    decode = KVBench(volume, tokens=tokens)
    media = [item("a", 2, 5)] if length > 8 else None  # without pixels, and no store has it
    decode.add("d", length, kv, media=media, max_tokens=4)
    decode.run()
    assert decode.told["d"] == [100 + length, 101 + length, 102 + length, 103 + length]
    assert decode.ends["d"].finish_reason is FinishReason.LENGTH
    assert min(start for _, start, _ in decode.computed) == length
    assert decode.ec.probes == 0
    assert volume == {}, "what was pulled is deleted"
    decode.assert_at_rest()


def test_the_first_token_is_told_only_once_the_kv_is_here() -> None:
    volume: Volume = {}
    kv = prefilled(volume, 9)
    decode = KVBench(volume)
    decode.hold_loads = True
    decode.add("d", 9, kv, media=[item("a", 2, 5)])
    for _ in range(3):
        assert decode.step().chunks == []
    assert decode.told == {}
    decode.hold_loads = False
    decode.step()
    assert decode.told["d"] == [109]


def test_others_are_served_while_a_request_loads() -> None:
    volume: Volume = {}
    kv = prefilled(volume, 9)
    decode = KVBench(volume)
    decode.hold_loads = True
    decode.add("d", 9, kv, media=[item("a", 2, 5)])
    decode.add("plain", 5, None)
    for _ in range(6):
        decode.step()
    assert decode.ends["plain"].finish_reason is FinishReason.LENGTH
    assert "d" not in decode.ends


def test_lost_kv_is_a_retryable_miss_of_that_request_alone() -> None:
    volume: Volume = {}
    kv = prefilled(volume, 9)
    decode = KVBench(volume)
    decode.add("plain", 5, None)
    volume.clear()
    decode.add("d", 9, kv, media=[item("a", 2, 5)])
    decode.run()
    error = decode.ends["d"].error
    assert error is not None
    assert (error.status, error.code, decode.told["d"]) == (503, "kv_miss", [])
    assert decode.ends["plain"].error is None
    decode.assert_at_rest()


def test_a_client_that_goes_while_kv_loads_frees_blocks_only_after_the_load() -> None:
    volume: Volume = {}
    kv = prefilled(volume, 9)
    decode = KVBench(volume)
    decode.hold_loads = True
    made = decode.add("d", 9, kv, media=[item("a", 2, 5)])
    decode.step()
    assert made.status is RequestStatus.LOADING
    decode.scheduler.abort("d")
    decode.step()
    assert decode.pool.num_free == decode.pool.num_blocks - 3, "somebody still writes to them"
    assert decode.scheduler.num_waiting == 1, "the engine must not sleep over it"
    decode.hold_loads = False
    decode.run()
    assert volume == {}
    decode.assert_at_rest()


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_client_that_goes_frees_files_and_blocks(when: str) -> None:
    volume: Volume = {}
    kv = prefilled(volume, 9)
    decode = KVBench(volume)
    decode.add("d", 9, kv, media=[item("a", 2, 5)], max_tokens=50)
    for _ in range(0 if when == "waiting" else 3):
        decode.step()
    decode.scheduler.abort("d")
    decode.run()
    assert volume == {}
    decode.assert_at_rest()


@pytest.mark.parametrize("eos", [True, False])
def test_an_answer_that_ends_with_the_first_token_loads_nothing(eos: bool) -> None:
    volume: Volume = {}
    kv = prefilled(volume, 9)
    decode = KVBench(volume)
    made = decode.add("d", 9, None, max_tokens=1)  # a plain one, made over
    decode.scheduler.abort("d")
    made.kv, made.status = kv, RequestStatus.WAITING
    if eos:
        made.eos_token_ids, made.sampling = frozenset({109}), made.sampling.__class__(max_tokens=9)
    decode.scheduler.add(made)
    decode.run()
    assert decode.told["d"] == [109]
    assert decode.ends["d"].finish_reason is (FinishReason.STOP if eos else FinishReason.LENGTH)
    assert decode.computed == []
    assert volume == {}
    decode.assert_at_rest()


def test_a_known_beginning_is_not_loaded() -> None:
    volume: Volume = {}
    decode = KVBench(volume)
    for name, length in (("d", 17), ("e", 18), ("f", 16)):
        prefill = KVBench(volume)
        prefill.add("p", length, RemoteDecode())
        prefill.run()
        decode.add(name, length, handed_on(prefill, "p"), max_tokens=2)
        step = decode.step()
        (loaded,) = [load.first for load in step.kv_connector_metadata.loads] or [None]  # type: ignore
        assert loaded == {"d": 0, "e": 4, "f": None}[name]
        decode.run()
        assert decode.told[name] == [100 + length, 101 + length]
    assert volume == {}
    decode.assert_at_rest()


def test_a_preempted_request_loads_its_prompt_again_and_repeats_no_token() -> None:
    volume: Volume = {}
    decode = KVBench(volume, blocks=10)
    for name in ("d", "e"):
        kv = prefilled(volume, 13, name)  # nothing is shared
        decode.add(name, 13, kv, media=[item("a", 2, 5)], max_tokens=20, salt=name)
    decode.run()
    assert decode.told["d"] == decode.told["e"] == [113 + n for n in range(20)]
    assert all(start >= 13 for _, start, _ in decode.computed)
    assert len([1 for name, start, _ in decode.computed if name == "e" and start == 13]) == 2, "preempted"
    assert volume == {}
    decode.assert_at_rest()


def test_a_preempted_request_whose_kv_is_gone_ends_with_a_miss() -> None:
    volume: Volume = {}
    decode = KVBench(volume, blocks=10)
    for name in ("d", "e"):
        kv = prefilled(volume, 13, name)
        decode.add(name, 13, kv, media=[item("a", 2, 5)], max_tokens=20, salt=name)
    for _ in range(3):
        decode.step()
    volume.clear()
    decode.run()
    error = decode.ends["e"].error
    assert error is not None
    assert error.code == "kv_miss"
    assert decode.told["d"] == [113 + n for n in range(20)]
    decode.assert_at_rest()


def test_a_preempted_prefill_saves_each_block_once() -> None:
    volume: Volume = {}
    prefill = KVBench(volume, blocks=9, tokens=8)
    prefill.add("old", 14, None, max_tokens=12)
    prefill.step()
    prefill.add("p", 22, RemoteDecode(), salt="p")
    prefill.run()
    kv = handed_on(prefill, "p")
    starts = [start for name, start, _ in prefill.computed if name == "p"]
    assert starts != sorted(starts), "it was not preempted"
    decode = KVBench(volume)
    decode.add("d", 22, kv, salt="p")
    decode.run()
    assert decode.told["d"] == [122, 123, 124, 125]


def test_prefill_answers_once_its_kv_is_saved() -> None:
    volume: Volume = {}
    prefill = KVBench(volume)
    prefill.hold_saves = True
    prefill.add("p", 9, RemoteDecode())
    for _ in range(3):
        prefill.step()
    assert prefill.ends == {}
    assert prefill.pool.num_free == prefill.pool.num_blocks, "the copies are made: blocks serve others"
    assert prefill.scheduler.num_waiting == 1
    prefill.hold_saves = False
    prefill.run()
    assert prefill.ends["p"].kv_transfer_params is not None
    prefill.assert_at_rest()


def test_prefill_that_cannot_save_says_so() -> None:
    prefill = KVBench({})
    prefill.fail_saves = True
    prefill.add("p", 9, RemoteDecode())
    prefill.run()
    error = prefill.ends["p"].error
    assert error is not None
    assert (error.status, error.code) == (503, "kv_store_unavailable")
    assert "no space" in str(error)
    prefill.assert_at_rest()
    assert prefill.volume == {}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_a_client_that_leaves_a_prefill_leaves_nothing(steps: int) -> None:
    volume: Volume = {}
    prefill = KVBench(volume, tokens=8)
    prefill.hold_saves = True
    prefill.add("p", 22, RemoteDecode())
    for _ in range(steps):
        prefill.step()
    prefill.scheduler.abort("p")
    prefill.run()
    assert volume == {}
    assert "p" not in prefill.ends
    prefill.assert_at_rest()


def test_what_nobody_pulls_goes_at_the_end_of_its_lease() -> None:
    volume: Volume = {}
    prefill = KVBench(volume)
    prefill.add("p", 9, RemoteDecode())
    prefill.run()
    prefill.now = 59
    prefill.step()
    assert len(volume) == 1
    prefill.now = 61
    prefill.step()
    assert volume == {}


def test_another_length_of_prompt_is_refused_with_both() -> None:
    volume: Volume = {}
    kv = prefilled(volume, 9)
    with pytest.raises(RequestError, match="9 tokens, and 10 here") as refused:
        KVBench(volume).add("d", 10, kv)
    assert (refused.value.status, refused.value.code) == (409, "kv_incompatible")


@pytest.mark.parametrize("ends", [None, [], [2], [4], [1, 1, 3], [-1, 3], [1, 3.0], [0, 3], "3", [3, 3]])
def test_file_ranges_that_do_not_make_up_the_prompt_are_a_miss(ends: object) -> None:
    volume: Volume = {}
    kv = prefilled(volume, 9)
    lying = kv.__class__(**{**vars(kv), "connector": {"block_ends": ends}})
    with pytest.raises(RequestError) as refused:
        KVBench(volume).add("d", 9, lying)
    assert refused.value.code == "kv_miss"


def test_random_traffic_comes_to_rest() -> None:
    chance = random.Random(7)
    for _ in range(40):
        volume: Volume = {}
        prefill = KVBench(volume, blocks=16, tokens=8)
        decode = KVBench(volume, blocks=16, tokens=8, seqs=4)
        wanted: dict[str, tuple[int, int]] = {}
        for n in range(12):
            length = chance.randint(1, 30)
            wanted[f"r{n}"] = length, chance.randint(1, 20)
            prefill.add(f"r{n}", length, RemoteDecode())
        for name in list(wanted):
            if chance.random() < 0.2:
                prefill.scheduler.abort(name)
        prefill.run()
        for name in prefill.ends:
            length, most = wanted[name]
            decode.add(name, length, handed_on(prefill, name), max_tokens=most)
            decode.hold_loads = chance.random() < 0.3
            for _ in range(chance.randint(0, 3)):
                decode.step()
            if chance.random() < 0.2:
                decode.scheduler.abort(chance.choice(list(prefill.ends)))
        decode.hold_loads = False
        decode.run()
        for name, end in decode.ends.items():
            length, most = wanted[name]
            assert end.error is None
            assert decode.told[name] == [100 + length + n for n in range(most)]
        assert volume == {}
        prefill.assert_at_rest()
        decode.assert_at_rest()


def test_a_prefill_that_is_refused_for_its_media_is_in_no_book() -> None:
    prefill = KVBench({})
    with pytest.raises(RequestError, match="encoder cache"):
        prefill.add("p", 200, RemoteDecode(), media=[item("huge", 2, 100, pixels=True)])
    prefill.assert_at_rest()
