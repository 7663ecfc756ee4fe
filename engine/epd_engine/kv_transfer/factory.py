"""Connectors by name. Nothing is imported before it is asked for."""

import importlib
from typing import ClassVar

from epd_engine.kv_transfer.base import KVConnectorBase, KVConnectorRole, KVModelIdentity
from epd_engine.kv_transfer.config import KVConfigError, KVTransferConfig

_NOT_YET = frozenset({"NixlConnector", "NixlKVConnector"})


class KVConnectorFactory:
    """Makes the connector a config names; others come in by `kv_connector_module_path`."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Raises ValueError for a name that is taken."""
        if name in cls._registry:
            raise ValueError(f"KV connector {name!r} is registered already")
        cls._registry[name] = (module_path, class_name)

    @classmethod
    def get_connector_class(cls, config: KVTransferConfig) -> type[KVConnectorBase]:
        """Raises `KVConfigError` for a name that nobody registered or a module that lacks it."""
        if config.kv_connector_module_path is not None:
            module_path, class_name = config.kv_connector_module_path, config.kv_connector
        elif config.kv_connector in cls._registry:
            module_path, class_name = cls._registry[config.kv_connector]
        else:
            known = ", ".join(sorted(cls._registry))
            if config.kv_connector in _NOT_YET:
                raise KVConfigError(
                    f"kv_connector {config.kv_connector!r} is not supported yet; known are {known}"
                )
            raise KVConfigError(
                f"unknown kv_connector {config.kv_connector!r}; known are {known}, "
                "others need kv_connector_module_path"
            )
        try:
            found = getattr(importlib.import_module(module_path), class_name)
        except (ImportError, AttributeError) as error:
            raise KVConfigError(f"kv_connector {class_name!r} is not in {module_path}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, KVConnectorBase)):
            raise KVConfigError(f"{module_path}.{class_name} is no KVConnectorBase")
        return found

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
