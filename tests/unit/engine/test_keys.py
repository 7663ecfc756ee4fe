import pytest

from epd_engine.ec_store.errors import InvalidKey
from epd_engine.ec_store.keys import MediaContent, check_key, mm_hash

BASE = {
    "fingerprint": "f" * 64,
    "modality": "image",
    "options": {"max_pixels": 100},
    "content": MediaContent("RGB", (30, 150), bytes(30 * 150 * 3)),
    "salt": "",
}


def test_the_key_is_64_hex_digits_and_the_same_for_equal_input() -> None:
    assert mm_hash(**BASE) == mm_hash(**BASE)
    assert check_key(mm_hash(**BASE)) == mm_hash(**BASE)


def test_the_key_is_a_fixed_value() -> None:
    """Pods of two releases share a store: a key may change only together with KEY_VERSION."""
    content = MediaContent("RGB", (1, 1), b"\x01\x02\x03")
    key = mm_hash(fingerprint="ab", modality="image", options={}, content=content)
    assert key == "60e2bfc71a6dd565da210cd28b364d22df41b4e9606a6dc08fd1b128293bd62e"


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "e" * 64},
        {"modality": "video"},
        {"options": {"max_pixels": 101}},
        {"options": {}},
        {"salt": "tenant-a"},
        {"content": MediaContent("RGB", (150, 30), bytes(30 * 150 * 3))},
        {"content": MediaContent("HSV", (30, 150), bytes(30 * 150 * 3))},
        {"content": MediaContent("RGB", (30, 150), bytes(30 * 150 * 3 - 1) + b"\x01")},
    ],
)
def test_every_field_changes_the_key(change: dict) -> None:
    assert mm_hash(**{**BASE, **change}) != mm_hash(**BASE)


def test_options_do_not_depend_on_their_order() -> None:
    one = {**BASE, "options": {"a": 1, "b": 2}}
    other = {**BASE, "options": {"b": 2, "a": 1}}
    assert mm_hash(**one) == mm_hash(**other)


def test_fields_cannot_run_into_one_another() -> None:
    one = {**BASE, "modality": "imagex", "salt": ""}
    other = {**BASE, "modality": "image", "salt": "x"}
    assert mm_hash(**one) != mm_hash(**other)


def test_options_that_json_cannot_carry_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        mm_hash(**{**BASE, "options": {"scale": float("nan")}})


@pytest.mark.parametrize(
    "bad", ["", "../x", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 63 + "/", "a" * 64 + "\n", None, 7]
)
def test_anything_but_a_whole_key_is_refused(bad: object) -> None:
    with pytest.raises(InvalidKey):
        check_key(bad)
