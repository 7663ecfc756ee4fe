"""API keys over HTTP: who is let in, what tenants share, and how the file is followed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from pathlib import Path

import pytest

from epd_proxy import door
from tests.integration.proxy.harness import MakeSetup, Setup, image, text, until
from tests.integration.proxy.scripted import ANSWER, fails, waits
from tests.integration.proxy.test_proxy_process import running


def content(*names: str, tenant: str | None = None) -> bytes:
    """A file of keys; the key of `a` is `key-a`."""
    entries = [
        {"name": name, "sha256": hashlib.sha256(f"key-{name}".encode()).hexdigest()}
        | ({"tenant": tenant} if tenant else {})
        for name in names
    ]
    return json.dumps({"keys": entries}).encode()


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{name}"}


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, as a Secret's volume has it: a link to a link to a folder."""
    monkeypatch.setattr(door, "POLL_SECONDS", 0.02)
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    swap(tmp_path, content("a", "b"))
    return tmp_path / "keys.json"


def swap(volume: Path, text: bytes) -> None:
    """What the kubelet does when a Secret has changed."""
    folder = volume / f"..{len(list(volume.iterdir()))}"
    folder.mkdir()
    (folder / "keys.json").write_bytes(text)
    (volume / "..next").symlink_to(folder.name)
    os.replace(volume / "..next", volume / "..data")


async def status(s: Setup, name: str) -> int:
    return (await s.chat(text("hi"), headers=of(name))).status_code


async def until_status(s: Setup, name: str, expected: int) -> None:
    async def seen() -> bool:
        return await status(s, name) == expected

    await until(seen)


@pytest.mark.parametrize("headers", [{}, of("c"), {"authorization": "Basic key-a"}])
async def test_without_a_known_key_nothing_is_served(setup: MakeSetup, keys: Path, headers):
    s = await setup(api_keys=keys)
    refused = [
        await s.chat(image("a"), headers=headers),
        await s.client.get("/v1/models", headers=headers),
        await s.client.get("/v1/nothing", headers=headers),
    ]
    for answer in refused:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert not s.encoders[0].calls
    assert not s.pds[0].calls
    assert await s.metric('epd_proxy_requests_total{stage="proxy",status="401"}') == 1


async def test_probes_and_metrics_need_no_key(setup: MakeSetup, keys: Path):
    s = await setup(api_keys=keys)
    for path in ("/health", "/ready", "/metrics"):
        assert (await s.client.get(path)).status_code == 200


async def test_a_key_ends_at_the_proxy_and_its_name_is_counted(setup: MakeSetup, keys: Path, caplog):
    caplog.set_level(logging.INFO)
    s = await setup(api_keys=keys)
    assert (await s.chat(text("?"), image("a"), headers=of("a"))).content == ANSWER
    assert (await s.client.get("/v1/models", headers=of("a"))).status_code == 200
    for call in (*s.encoders[0].calls, *s.pds[0].calls):
        assert "authorization" not in call.request.headers
    assert await s.metric('epd_proxy_key_requests_total{key="a",tenant="a"}') == 1
    (line,) = [record.fields for record in caplog.records if record.message == "request"]
    assert (line["key"], line["tenant"]) == ("a", "a")
    assert "key-a" not in caplog.text + (await s.client.get("/metrics")).text


async def test_tenants_share_no_item_and_keys_of_one_tenant_do(setup: MakeSetup, keys: Path):
    swap(keys.parent, content("a", "b"))
    s = await setup(api_keys=keys)
    for name in ("a", "a", "b"):
        await s.chat(image("x"), headers=of(name))
    salts = [call.body["cache_salt"] for call in s.encoders[0].calls]
    assert len(salts) == len(set(salts)) == 2
    assert [call.body["cache_salt"] for call in s.pds[0].calls] == [salts[0], salts[0], salts[1]]

    swap(keys.parent, content("c", "d", tenant="one"))
    await until_status(s, "c", 200)
    for name in ("c", "d"):
        await s.chat(image("x"), headers=of(name))
    assert len(s.encoders[0].calls) == 3


async def test_equal_items_of_two_tenants_in_flight_are_encoded_twice(setup: MakeSetup, keys: Path):
    s = await setup(api_keys=keys)
    await asyncio.gather(*(s.chat(image("x"), headers=of(name)) for name in "aabb"))
    assert len(s.encoders[0].calls) == 2


async def test_a_clients_own_salt_parts_a_tenants_cache_and_reaches_no_other(setup: MakeSetup, keys: Path):
    s = await setup(api_keys=keys)
    await s.chat(image("x"), headers=of("a"))
    theirs = s.encoders[0].calls[0].body["cache_salt"]
    await s.chat(image("x"), headers=of("b"), cache_salt=theirs)
    await s.chat(image("x"), headers=of("a"), cache_salt=theirs)
    await s.chat(image("x"), headers=of("a"), cache_salt="mine")
    assert len({call.body["cache_salt"] for call in s.encoders[0].calls}) == 4


async def test_text_goes_on_with_the_clients_own_bytes(setup: MakeSetup, keys: Path):
    s = await setup(api_keys=keys)
    raw = b'{ "messages" : [{"role":"user","content":"h\\u00e9llo"}],   "model":"digits" }'
    await s.client.post("/v1/chat/completions", content=raw, headers=of("a"))
    assert s.pds[0].calls[0].raw == raw


async def test_a_re_prime_keeps_the_salt(setup: MakeSetup, keys: Path):
    s = await setup(api_keys=keys)
    s.pds[0].script.append(fails(503, "ec_miss"))
    await s.chat(image("x"), headers=of("a"))
    first, second = s.encoders[0].calls
    assert first.body == second.body
    assert s.pds[0].calls[0].body == s.pds[0].calls[1].body


async def test_the_file_is_followed_through_a_volumes_links(setup: MakeSetup, keys: Path):
    s = await setup(api_keys=keys)
    assert [await status(s, name) for name in "abc"] == [200, 200, 401]
    swap(keys.parent, content("b", "c"))
    await until_status(s, "a", 401)
    assert [await status(s, name) for name in "abc"] == [401, 200, 200]
    assert 'key="a"' not in (await s.client.get("/metrics")).text


async def test_a_request_that_outlives_its_key_is_answered_and_does_not_bring_its_series_back(
    setup: MakeSetup, keys: Path
):
    s = await setup(api_keys=keys)
    assert await status(s, "a") == 200
    gate = asyncio.Event()
    s.pds[0].script.append(waits(gate, s.pds[0].default))
    late = asyncio.create_task(status(s, "a"))
    await s.pds[0].wait_calls(2)
    swap(keys.parent, content("b"))
    await until_status(s, "a", 401)
    gate.set()
    assert await late == 200
    assert 'key="a"' not in (await s.client.get("/metrics")).text


@pytest.mark.parametrize("broken", [b"{", b'{"keys": [{"name": "c"}]}', None])
async def test_a_broken_or_lost_file_keeps_the_old_keys_and_says_so_once(
    setup: MakeSetup, keys: Path, caplog, broken
):
    def said() -> int:
        return sum(record.message == "api_keys_unusable" for record in caplog.records)

    async def complained() -> bool:
        return said() > 0

    s = await setup(api_keys=keys)
    if broken is None:
        (keys.parent / "..data").unlink()
    else:
        swap(keys.parent, broken)
    await until(complained)
    for _ in range(5):
        await asyncio.sleep(door.POLL_SECONDS)
    assert said() == 1
    assert await status(s, "a") == 200
    swap(keys.parent, content("c"))
    await until_status(s, "c", 200)
    assert await status(s, "a") == 401


async def test_the_process_says_who_may_come_in(tmp_path: Path):
    async with running() as r:
        lines = await r.stop()
    assert [line["level"] for line in lines if line["event"] == "door_open"] == ["warning"]
    path = tmp_path / "keys.json"
    path.write_bytes(content("a"))
    async with running("--api-keys-file", str(path)) as r:
        assert (await r.client.get("/v1/models")).status_code == 401
        lines = await r.stop()
    assert [line["keys"] for line in lines if line["event"] == "api_keys"] == [1]
    assert not [line for line in lines if line["event"] == "door_open"]
