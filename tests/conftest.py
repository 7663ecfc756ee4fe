"""Fixtures that tests of several folders share."""

from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.cluster.fixtures"]


@pytest.fixture(scope="session")
def audio_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen2-Audio of random weights."""
    from tests.support.sounds import make_audio_model  # torch, which most suites can do without

    return make_audio_model(tmp_path_factory.mktemp("models") / "audio")


@pytest.fixture(scope="session")
def audio_reference(audio_model: Path) -> Any:
    from tests.support.sounds import AudioReference

    return AudioReference(audio_model)
