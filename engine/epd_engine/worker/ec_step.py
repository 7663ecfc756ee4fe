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
    *,
    wait_for_saves: bool,
) -> Iterator[ECConnectorOutput]:
    """Yields the output that is filled in once the block ends; external items are loaded on entry."""
    output = ECConnectorOutput()
    if connector is None:
        yield output
        return
    assert metadata is not None, "a connector's step has metadata"
    connector.bind_connector_metadata(metadata)
    try:
        connector.free_physical_cache()
        connector.start_load_caches(encoder_cache)
        yield output
        if wait_for_saves:
            connector.wait_for_save()
        output.merge(connector.get_finished())
    finally:
        connector.clear_connector_metadata()
