"""A connector's worker side around one step: bind, load, ... , wait for saves, collect, clear."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from epd_engine.ec_transfer.base import ECConnectorBase, ECConnectorMetadata, ECConnectorOutput


@contextmanager
def ec_step(
    connector: ECConnectorBase | None,
    metadata: ECConnectorMetadata | None,
    encoder_cache: dict[str, torch.Tensor],
) -> Iterator[ECConnectorOutput]:
    """Yields the output that is filled in once the block ends; external items are loaded on entry."""
    output = ECConnectorOutput()
    if connector is None:
        yield output
        return
    assert metadata is not None, "a connector's step has metadata"
    connector.bind_connector_metadata(metadata)
    try:
        connector.start_load_caches(encoder_cache)
        yield output
        connector.wait_for_save()
        done = connector.get_finished()
        output.finished_sending |= done.finished_sending
        output.finished_recving |= done.finished_recving
        output.failed_sending |= done.failed_sending
        output.failed_recving |= done.failed_recving
    finally:
        connector.clear_connector_metadata()
