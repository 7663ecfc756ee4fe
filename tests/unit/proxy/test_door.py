"""API keys: the file, who is let in, and the salt of a tenant."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from epd_proxy.door import Caller, Door, read_keys
from epd_proxy.errors import Unauthorized
from epd_proxy.metrics import Metrics


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, **more: object) -> dict[str, object]:
    return {"name": name, "sha256": digest(f"key of {name}"), **more}


def text(*entries: object) -> bytes:
    return json.dumps({"keys": entries}).encode()


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def door(path: Path, *entries: object) -> Door:
    path.write_bytes(text(*entries))
    return Door(path, Metrics())


def test_a_file_of_keys():
    keys = read_keys(text(entry("a", tenant="team"), entry("b")))
    assert list(keys.values()) == [Caller("a", "team"), Caller("b", "b")]
    assert read_keys(b'{"keys": []}') == {}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (b"[]", "the file must be"),
        (b'{"keys": {}}', "the file must be"),
        (b'{"keys": [], "kyes": []}', "the file must be"),
        (text("a"), r"keys\[0\] must have"),
        (text({"name": "a", "key": "secret"}), r"keys\[0\] must have"),
        (text(entry("a", tenat="t")), r"keys\[0\] must have"),
        (text(entry("a"), {"name": "b", "sha256": "the key itself"}), r"keys\[1\].sha256 must be 64 hex"),
        (text(entry("a b")), r"keys\[0\].name"),
        (text(entry("a", tenant="")), r"keys\[0\].tenant"),
        (text(entry("a", tenant=None)), r"keys\[0\].tenant"),
        (text(entry("a"), entry("a", sha256=digest("x"))), r"keys\[1\] has the name"),
        (text(entry("a"), entry("b", sha256=digest("key of a"))), r"keys\[1\] has the name or the key"),
    ],
)
def test_a_wrong_file_is_explained_without_what_it_holds(wrong, words):
    with pytest.raises(ValueError, match=words) as error:
        read_keys(wrong)
    assert "secret" not in str(error.value)
    assert "the key itself" not in str(error.value)


def test_keys_are_told_apart(tmp_path: Path):
    home = door(tmp_path / "keys.json", entry("a", tenant="team"), entry("b"))
    assert home.admit(bearer("key of a")) == Caller("a", "team")
    assert home.admit({b"authorization": b"bearer  key of b "}) == Caller("b", "b")
    assert home.passed_on(bearer("key of a")) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("key of A"),
        bearer(digest("key of a")),
        {b"authorization": b"key of a"},
        {b"authorization": b"Basic key of a"},
        {b"x-api-key": b"key of a"},
    ],
)
def test_others_are_refused(tmp_path: Path, headers):
    with pytest.raises(Unauthorized):
        door(tmp_path / "keys.json", entry("a")).admit(headers)


def test_no_keys_at_all_let_nobody_in(tmp_path: Path):
    with pytest.raises(Unauthorized):
        door(tmp_path / "keys.json").admit(bearer("key of a"))


def test_without_a_file_the_door_is_open():
    home = Door(None, Metrics())
    assert home.admit({}) is None
    assert home.passed_on(bearer("the engine's")) == b"Bearer the engine's"


@pytest.mark.parametrize("content", [None, b"", b"{", text({"name": "a"})])
def test_a_file_that_cannot_be_used_at_the_start_is_an_error(tmp_path: Path, content):
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((OSError, ValueError)):
        Door(path, Metrics())


def test_salts_differ_between_tenants_and_between_what_a_client_gave():
    a, b = Caller("1", "a"), Caller("2", "b")
    salts = [caller.salt(given) for caller in (a, b) for given in (None, "", "x", a.salt(None), b.salt("x"))]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 64 for salt in salts)


def test_salts_are_the_tenants_and_stay():
    assert Caller("1", "a").salt("x") == Caller("2", "a").salt("x")
    # What lies in a store was salted by earlier versions.
    assert Caller("1", "a").salt(None) == "0ccfe988f61102a22304f1786a0836ca4e900d6730544dfd60d5386ca89effd7"
