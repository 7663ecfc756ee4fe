"""What once ended a whole PD of vLLM fails one request, and the next one is right."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from epd_engine.ec_store.entry import EntryHeader, decode_header
from epd_engine.ec_store.file_store import FileStore
from tests.vllm.client import Deployment, about, ask, picture, prime, question

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ROWS, WIDTH = 16, 128  # of a picture of 112x112, in the tiny model


@dataclass(frozen=True)
class Stored:
    """An entry as an encoder of vLLM wrote it."""

    path: Path

    @property
    def header(self) -> EntryHeader:
        data = self.path.read_bytes()
        return decode_header(memoryview(data), len(data))[0]

    def replace(self, rows: int = ROWS, width: int = WIDTH, **changes: Any) -> None:
        """Another whole entry in its place, with a right checksum."""
        header = self.header
        tensor = torch.rand(rows, width).to(changes.get("dtype", header.dtype))
        namespace = self.path.parent.parent
        FileStore(namespace.parent, namespace.name).save(
            self.path.parent.name,
            tensor,
            fingerprint=changes.get("fingerprint", header.fingerprint),
            modality=header.modality,
            metadata=changes.get("metadata", header.metadata),
        )

    def truncate(self) -> None:
        data = self.path.read_bytes()
        self.path.write_bytes(data[: len(data) // 2])

    def flip(self) -> None:
        data = bytearray(self.path.read_bytes())
        data[-1] ^= 1
        self.path.write_bytes(data)

    def delete(self) -> None:
        shutil.rmtree(self.path.parent)


FAULTS: dict[str, Callable[[Stored], None]] = {
    "deleted after the primer": Stored.delete,
    "truncated": Stored.truncate,
    "altered": Stored.flip,
    "too many rows": lambda entry: entry.replace(rows=ROWS + 4),
    "too few rows": lambda entry: entry.replace(rows=ROWS - 4),
    "another width": lambda entry: entry.replace(width=2 * WIDTH),
    "another dtype": lambda entry: entry.replace(dtype=torch.float16),
    "another model's": lambda entry: entry.replace(fingerprint="0" * 64),
    "another grid": lambda entry: entry.replace(metadata={"image_grid_thw": [1, 4, 16]}),
}


def assert_serves(epd: Deployment) -> None:
    """The PD lives, and the next request is right."""
    assert httpx.get(f"{epd.pd.url}/health", timeout=10).status_code == 200
    messages = question(picture())
    answer = ask(epd.front, epd.model, messages)
    assert answer == ask(epd.aggregated, epd.model, messages)
    assert answer.text


@STREAMS
@pytest.mark.parametrize("fault", FAULTS)
def test_the_pd_fails_the_request_for_a_damaged_entry_and_lives(
    epd: Deployment, fault: str, stream: bool
) -> None:
    parts = prime(epd.encoder, epd.model, picture())
    FAULTS[fault](Stored(epd.entries()[-1]))
    answer = ask(epd.pd, epd.model, about(*parts), stream=stream)
    assert not answer.text
    assert answer.code == 500
    assert_serves(epd)


@STREAMS
@pytest.mark.parametrize("grid", [[1, 16, 16], [1, 4, 4], [1, 4, 16]], ids=["larger", "smaller", "turned"])
def test_a_grid_that_is_not_the_entrys_fails_the_request(
    epd: Deployment, grid: list[int], stream: bool
) -> None:
    (part,) = prime(epd.encoder, epd.model, picture())
    lie = {**part, "image_embeds": {"image_grid_thw": grid}}
    assert not ask(epd.pd, epd.model, about(lie), stream=stream).text
    assert ask(epd.pd, epd.model, about(part)).text
    assert not ask(epd.pd, epd.model, about(lie), stream=stream).text  # now that the item is resident
    assert_serves(epd)


@STREAMS
@pytest.mark.parametrize("key", ["ab" * 32, "../elsewhere/x"], ids=["unknown", "no key"])
def test_an_item_that_was_never_stored_fails_the_request(epd: Deployment, key: str, stream: bool) -> None:
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 8]}, "uuid": key}
    answer = ask(epd.pd, epd.model, about(part), stream=stream)
    assert (answer.text, answer.code) == ("", 500)
    assert_serves(epd)


def test_one_lost_item_of_two_fails_the_request_and_the_other_one_is_used_again(epd: Deployment) -> None:
    kept, lost = picture(), picture()
    parts = [*prime(epd.encoder, epd.model, kept), *prime(epd.encoder, epd.model, lost)]
    Stored(epd.entries()[-1]).delete()
    assert ask(epd.pd, epd.model, about(*parts)).code == 500
    assert ask(epd.pd, epd.model, about(parts[0])) == ask(epd.aggregated, epd.model, question(kept))
    assert_serves(epd)


@STREAMS
@pytest.mark.parametrize("fault", ["deleted after the primer", "truncated"])
def test_through_the_proxy_the_item_is_encoded_again_and_the_answer_is_right(
    epd: Deployment, fault: str, stream: bool
) -> None:
    """The proxy knows the item from a moment ago and asks no encoder, until the PD misses it."""
    url = picture()
    right = ask(epd.aggregated, epd.model, question(url))
    before = epd.front.metric("epd_proxy_reprimes_total")
    # Another question about the picture, cut short: the store has it and no PD does.
    prime_through(epd, url)
    FAULTS[fault](Stored(epd.entries()[-1]))
    assert ask(epd.front, epd.model, question(url), stream=stream) == right
    assert epd.front.metric("epd_proxy_reprimes_total") == before + 1


def prime_through(epd: Deployment, url: str) -> None:
    """Has the proxy prime a picture for a request that its PD then refuses: its prompt is too long."""
    messages = question(url)
    messages[0]["content"][1]["text"] = "red blue " * 3000
    assert ask(epd.front, epd.model, messages).status == 400


@STREAMS
def test_an_item_that_cannot_be_kept_ends_in_ec_miss(epd: Deployment, stream: bool) -> None:
    """The store's files are as fast gone as they are written."""
    url = picture()
    prime_through(epd, url)
    entry = epd.entries()[-1]
    shutil.rmtree(entry.parent)
    entry.parent.write_text("in the way of the entry's directory")
    try:
        answer = ask(epd.front, epd.model, question(url), stream=stream)
        assert answer.status == 503, answer
        assert answer.code in ("ec_miss", "ec_store_unavailable"), answer
    finally:
        entry.parent.unlink()
    assert_serves(epd)


def test_an_encoder_whose_store_was_cleaned_writes_the_item_again(epd: Deployment) -> None:
    url = picture()
    (part,) = prime(epd.encoder, epd.model, url)
    for entry in epd.entries():
        shutil.rmtree(entry.parent)
    assert prime(epd.encoder, epd.model, url) == [part]
    assert [entry.parent.name for entry in epd.entries()] == [part["uuid"]]
    assert ask(epd.pd, epd.model, about(part)) == ask(epd.aggregated, epd.model, question(url))


def test_a_uuid_reaches_no_file_and_no_other_clients_picture(epd: Deployment) -> None:
    first, second = question(picture()), question(picture())
    for messages in (first, second):
        messages[0]["content"][0]["uuid"] = "../elsewhere/x"
    answers = [ask(epd.front, epd.model, messages) for messages in (first, second)]
    assert answers == [ask(epd.aggregated, epd.model, question(url(m))) for m in (first, second)]
    assert answers[0] != answers[1]
    assert not list(epd.store.parent.rglob("elsewhere"))


def url(messages: list[dict[str, Any]]) -> str:
    found: str = messages[0]["content"][0]["image_url"]["url"]
    return found


def test_the_entry_says_what_it_is(epd: Deployment) -> None:
    (part,) = prime(epd.encoder, epd.model, picture())
    entry = Stored(epd.entries()[-1])
    assert entry.path.parent.name == part["uuid"]
    assert entry.path.parent.parent.name == entry.header.fingerprint[:16]
    assert entry.header.shape == (ROWS, WIDTH)
    assert json.loads(json.dumps(entry.header.metadata)) == part["image_embeds"]
    assert (entry.path.stat().st_mode & 0o777, entry.path.parent.stat().st_mode & 0o7777) == (0o660, 0o2770)
