"""The fingerprint for those who have no family module at hand."""

import importlib

from epd_engine.models.fingerprint import TOWER_PREFIXES
from epd_engine.models.registry import FAMILIES


def test_it_is_the_families_own() -> None:
    for architecture, (module, name) in FAMILIES.items():
        family = getattr(importlib.import_module(module), name)
        assert TOWER_PREFIXES[architecture] == tuple(family.tower_names)
