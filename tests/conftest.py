"""Fixtures that tests of several folders share."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.cluster.fixtures"]


def pytest_configure() -> None:
    """Networks of clusters come and go on this machine; NIXL would not survive the loss of one."""
    os.environ["UCX_NET_DEVICES"] = "lo"


@pytest.fixture(scope="session")
def audio_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen2-Audio of random weights."""
    from tests.support.sounds import make_audio_model  # torch, which most suites can do without

    return make_audio_model(tmp_path_factory.mktemp("models") / "audio")


@pytest.fixture(scope="session")
def audio_reference(audio_model: Path) -> Any:
    from tests.support.sounds import AudioReference

    return AudioReference(audio_model)
