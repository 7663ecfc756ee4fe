"""Connectors by name. Nothing is imported before it is asked for."""

import importlib
from typing import ClassVar

from epd_engine.ec_transfer.base import ECConnectorBase, ECConnectorRole, ECModelIdentity
from epd_engine.ec_transfer.config import ECConfigError, ECTransferConfig


class ECConnectorFactory:
    """Makes the connector a config names; others come in by `ec_connector_module_path`."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Raises ValueError for a name that is taken."""
        if name in cls._registry:
            raise ValueError(f"EC connector {name!r} is registered already")
        cls._registry[name] = (module_path, class_name)

    @classmethod
    def get_connector_class(cls, config: ECTransferConfig) -> type[ECConnectorBase]:
        """Raises `ECConfigError` for a name that nobody registered or a module that lacks it."""
        if config.ec_connector_module_path is not None:
            module_path, class_name = config.ec_connector_module_path, config.ec_connector
        elif config.ec_connector in cls._registry:
            module_path, class_name = cls._registry[config.ec_connector]
        else:
            known = ", ".join(sorted(cls._registry))
            raise ECConfigError(
                f"unknown ec_connector {config.ec_connector!r}; known are {known}, "
                "others need ec_connector_module_path"
            )
        try:
            found = getattr(importlib.import_module(module_path), class_name)
        except (ImportError, AttributeError) as error:
            raise ECConfigError(f"ec_connector {class_name!r} is not in {module_path}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, ECConnectorBase)):
            raise ECConfigError(f"{module_path}.{class_name} is no ECConnectorBase")
        return found

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
