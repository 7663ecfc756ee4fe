"""Which vLLM the connector accepts."""

import pytest

from epd_engine.vllm.versions import NEEDED, UnsupportedVllm, check_version


class Whole:
    """A connector base with all that is needed."""


for _name in NEEDED:
    setattr(Whole, _name, None)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.0+cpu", "0.33.1rc2"])
def test_a_supported_release_is_accepted_silently(version: str) -> None:
    assert check_version(version, Whole) is None


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.33.1.dev7+gabc", "dev"])
def test_what_nobody_has_tried_gets_a_warning_that_says_what_is_supported(version: str) -> None:
    warning = check_version(version, Whole)
    assert warning is not None
    assert "0.31 to 0.33" in warning


def test_an_older_release_is_refused() -> None:
    with pytest.raises(UnsupportedVllm, match=r"too old.*0\.31 to 0\.33"):
        check_version("0.30.1", Whole)


@pytest.mark.parametrize("absent", NEEDED)
def test_a_base_without_what_keeps_a_miss_harmless_is_refused_whatever_its_version(absent: str) -> None:
    class Lacking:
        pass

    for name in NEEDED:
        if name != absent:
            setattr(Lacking, name, None)
    with pytest.raises(UnsupportedVllm, match=absent):
        check_version("0.32.0", Lacking)
