"""KV connectors by name."""

from typing import ClassVar

from epd_engine.connectors import ConnectorRegistry
from epd_engine.kv_transfer.base import KVConnectorBase, KVConnectorRole, KVModelIdentity
from epd_engine.kv_transfer.config import KVConfigError, KVTransferConfig


class KVConnectorFactory:
    """Makes the connector a config names; others come in by `kv_connector_module_path`."""

    _registry: ClassVar[ConnectorRegistry[KVConnectorBase]] = ConnectorRegistry(
        "kv",
        KVConnectorBase,  # type: ignore[type-abstract]  # only ever asked for subclasses
        KVConfigError,
    )

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Raises ValueError for a name that is taken."""
        cls._registry.register(name, module_path, class_name)

    @classmethod
    def get_connector_class(cls, config: KVTransferConfig) -> type[KVConnectorBase]:
        """Raises `KVConfigError` for a name that nobody registered or a module that lacks it."""
        return cls._registry.find(config.kv_connector, config.kv_connector_module_path)

    @classmethod
    def create_connector(
        cls, config: KVTransferConfig, role: KVConnectorRole, identity: KVModelIdentity
    ) -> KVConnectorBase:
        """Raises `KVConfigError`."""
        return cls.get_connector_class(config)(config, role, identity)


KVConnectorFactory.register_connector(
    "SharedStorageKVConnector",
    "epd_engine.kv_transfer.shared_storage_connector",
    "SharedStorageKVConnector",
)
KVConnectorFactory.register_connector(
    "NixlKVConnector", "epd_engine.kv_transfer.nixl_connector", "NixlKVConnector"
)
