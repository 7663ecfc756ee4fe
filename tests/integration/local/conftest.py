"""`epd` in a state directory of its own, on real or stand-in engines."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.local.epd_runner import Epd, environment_with_standins, with_clean_end


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir()
    return path


@pytest.fixture
def real_epd(home: Path) -> Iterator[Epd]:
    """`epd` beside the real engine and proxy."""
    yield from with_clean_end(Epd(Path(sys.executable), home))


@pytest.fixture
def epd(home: Path, tmp_path: Path) -> Iterator[Epd]:
    """`epd` in an environment whose engine and proxy are the stand-ins."""
    yield from with_clean_end(Epd(environment_with_standins(tmp_path / "venv"), home))
