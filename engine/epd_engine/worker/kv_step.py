"""The KV connector's worker side around one step: bind, load, save layer by layer, collect, clear."""

from collections.abc import Iterator
from contextlib import contextmanager

from epd_engine.kv_transfer.base import KVConnectorBase, KVConnectorMetadata, KVConnectorOutput


@contextmanager
def kv_step(
    connector: KVConnectorBase | None, metadata: KVConnectorMetadata | None
) -> Iterator[KVConnectorOutput]:
    """Yields the output that is filled in once the block ends; loads begin on entry."""
    output = KVConnectorOutput()
    if connector is None:
        yield output
        return
    assert metadata is not None, "a connector's step has metadata"
    connector.bind_connector_metadata(metadata)
    try:
        connector.start_load_kv()
        yield output
        connector.wait_for_save()
        vars(output).update(vars(connector.get_finished()))
    finally:
        connector.clear_connector_metadata()
