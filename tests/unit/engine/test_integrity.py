"""An idle engine looks into its own books, and says once what it finds."""

import logging

import pytest

from epd_engine.config import EngineConfig
from epd_engine.engine import Engine
from tests.support.digits import MODEL


def test_a_leak_is_told_once_and_counted_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(EngineConfig(str(MODEL)))
    engine.step()
    assert engine.stats.integrity_problems == 0
    leaked: list[int] = []
    assert engine.pool.grow(leaked, 1)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            engine.step()
    assert engine.stats.integrity_problems == 2  # a block that nobody holds, and one that is lost
    (record,) = caplog.records
    assert f"blocks {leaked} are held by nobody" in record.getMessage()
    engine.pool.release(leaked)
    engine.step()
    assert engine.stats.integrity_problems == 0
