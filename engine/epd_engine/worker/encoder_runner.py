"""Runs the tower over a step's items and puts the outputs into the encoder cache."""

import logging
from collections.abc import Sequence
from itertools import chain

import torch

from epd_engine.core.request import MediaItem
from epd_engine.machine.device import check_alive
from epd_engine.models.base import ModelFamily

log = logging.getLogger(__name__)


class EncoderRunner:
    """`items_encoded` and `embeds_encoded` count what has gone through the tower."""

    def __init__(self, family: ModelFamily, encoder_cache: dict[str, torch.Tensor]):
        self._family, self._cache = family, encoder_cache
        self.items_encoded = 0
        self.embeds_encoded = 0

    def run(self, items: Sequence[MediaItem]) -> dict[str, str]:
        """Encodes `items` as one batch; returns the failures by mm_hash, absent from the cache.

        Where a batch fails each item is tried by itself: one that the tower cannot take, or no room for all
        at once, is nothing to the others.
        """
        if not items:
            return {}
        features = []
        for item in items:
            assert item.features is not None, "only items with features are scheduled for the tower"
            features.append(item.features)
        try:
            outputs = self._family.encode(features)
        except Exception as error:
            log.exception("the tower failed on %d items", len(items))
            check_alive(self._family.device)
            if len(items) == 1:
                return {items[0].mm_hash: f"the encoder failed on it: {error}"}
            return dict(chain.from_iterable(self.run([item]).items() for item in items))
        errors = {}
        for item, output in zip(items, outputs, strict=True):
            self.items_encoded += 1
            self.embeds_encoded += item.num_embeds
            problem = _problem(item, output, self._family.embed_width)
            if problem is None:
                self._cache[item.mm_hash] = output
            else:
                log.error("item %s is not published: %s", item.mm_hash, problem)
                errors[item.mm_hash] = problem
        return errors


def _problem(item: MediaItem, output: torch.Tensor, width: int) -> str | None:
    """Why an output must not be shared, if so."""
    if tuple(output.shape) != (item.num_embeds, width):
        return f"the encoder made {list(output.shape)}, expected [{item.num_embeds}, {width}]"
    if not bool(torch.isfinite(output).all()):
        return "the encoder's output holds NaN or infinity"
    return None
