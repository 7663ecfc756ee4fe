"""EC connectors by name."""

from typing import ClassVar

from epd_engine.connectors import ConnectorRegistry
from epd_engine.ec_transfer.base import ECConnectorBase, ECConnectorRole, ECModelIdentity
from epd_engine.ec_transfer.config import ECConfigError, ECTransferConfig


class ECConnectorFactory:
    """Makes the connector a config names; others come in by `ec_connector_module_path`."""

    _registry: ClassVar[ConnectorRegistry[ECConnectorBase]] = ConnectorRegistry(
        "ec",
        ECConnectorBase,  # type: ignore[type-abstract]  # only ever asked for subclasses
        ECConfigError,
    )

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Raises ValueError for a name that is taken."""
        cls._registry.register(name, module_path, class_name)

    @classmethod
    def get_connector_class(cls, config: ECTransferConfig) -> type[ECConnectorBase]:
        """Raises `ECConfigError` for a name that nobody registered or a module that lacks it."""
        return cls._registry.find(config.ec_connector, config.ec_connector_module_path)

    @classmethod
    def create_connector(
        cls, config: ECTransferConfig, role: ECConnectorRole, identity: ECModelIdentity
    ) -> ECConnectorBase:
        """Raises `ECConfigError`."""
        return cls.get_connector_class(config)(config, role, identity)


for _name, _module in (
    ("ECSharedStorageConnector", "shared_storage_connector"),
    ("ECSharedMemoryConnector", "shared_memory_connector"),
    ("ECTieredConnector", "tiered_connector"),
):
    ECConnectorFactory.register_connector(_name, f"epd_engine.ec_transfer.{_module}", _name)
# vLLM's later name of the first.
ECConnectorFactory.register_connector(
    "ECExampleConnector", "epd_engine.ec_transfer.shared_storage_connector", "ECSharedStorageConnector"
)
