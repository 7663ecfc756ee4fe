"""vLLM's EC connectors over our store: `EPDStoreConnector`, files; `EPDTieredConnector`, memory before files.

    --ec-transfer-config '{"ec_connector": "EPDStoreConnector", "ec_role": "ec_producer",
      "ec_connector_module_path": "epd_engine.vllm.connector",
      "ec_connector_extra_config": {"shared_storage_path": "/ec-store"}}'

The extra config is that of our own engine's connectors. vLLM makes one object in the scheduler's process and
one in each worker's; each plays its side.
"""

# mypy: disable-error-code="import-not-found"

import logging
from typing import Any, ClassVar

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.platforms import current_platform

from epd_engine.ec_transfer.base import ECConnectorBase as StoreSide
from epd_engine.ec_transfer.base import ECConnectorRole as Side
from epd_engine.ec_transfer.base import ECModelIdentity
from epd_engine.ec_transfer.config import ECConfigError, ECTransferConfig
from epd_engine.ec_transfer.factory import ECConnectorFactory
from epd_engine.vllm.loader import Loader
from epd_engine.vllm.metrics import StorePromMetrics, StoreStats
from epd_engine.vllm.model import Features, model_identity
from epd_engine.vllm.scheduler_side import SchedulerSide
from epd_engine.vllm.step import StepPlan, WorkerReport
from epd_engine.vllm.versions import check_version
from epd_engine.vllm.worker_side import WorkerSide
from vllm import __version__ as vllm_version

log = logging.getLogger("vllm.epd")  # below vLLM's own logger, whose settings it has


class EPDStoreConnector(ECConnectorBase):  # type: ignore[misc]
    """Entries as files on a volume that every instance mounts."""

    store: ClassVar[str] = "ECSharedStorageConnector"

    def __init__(self, vllm_config: Any, role: ECConnectorRole):
        """Raises `ECConfigError` for a config or a model that does not fit, or `UnsupportedVllm`."""
        super().__init__(vllm_config=vllm_config, role=role)
        if warning := check_version(vllm_version, ECConnectorBase):
            log.warning("%s", warning)
        self._metadata: StepPlan | None = None
        identity, config = model_identity(vllm_config), self._config(vllm_config)
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                Features(vllm_config), Loader(config, identity), self._saver(config, Side.SCHEDULER, identity)
            )
            log.info("EC store: model %s, %s", identity.fingerprint, dict(config.ec_connector_extra_config))
        else:
            parallel = vllm_config.parallel_config
            saves_here = parallel.rank % parallel.tensor_parallel_size == 0
            saver = self._saver(config, Side.WORKER, identity) if saves_here else None
            self._worker = WorkerSide(saver, current_platform.device_type)

    def _config(self, vllm_config: Any) -> ECTransferConfig:
        given = vllm_config.ec_transfer_config
        return ECTransferConfig(
            self.store,
            given.ec_role,
            engine_id=given.engine_id,
            ec_connector_extra_config=given.ec_connector_extra_config,
        )

    def _saver(self, config: ECTransferConfig, side: Side, identity: ECModelIdentity) -> StoreSide | None:
        if not self.is_producer:
            return None
        return ECConnectorFactory.create_connector(config, side, identity)

    # Scheduler side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._scheduler.ensure_cache_available(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        return self._scheduler.take_unavailable_requests()

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.has_cache_item(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self._scheduler.update_state_after_alloc(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.request_finished(request)

    # Worker side

    def bind_connector_metadata(self, connector_metadata: StepPlan) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._metadata = connector_metadata

    def start_save_caches(self, **kwargs: Any) -> None:
        assert self._metadata is not None
        self._worker.begin_saves(self._metadata, kwargs["encoder_cache"])

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        assert self._metadata is not None
        self._worker.place(self._metadata, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        self._worker.save(encoder_cache, mm_hash)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """There is no other place to wait for saves: the answer to a primer follows at once."""
        assert self._metadata is not None
        self._worker.finish(self._metadata)
        return None, None

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.report()

    # Both

    def shutdown(self) -> None:
        if self.role is ECConnectorRole.SCHEDULER:
            self._scheduler.close()
        else:
            self._worker.close()

    def get_ec_connector_stats(self) -> StoreStats | None:
        return self._scheduler.take_stats() if self.role is ECConnectorRole.SCHEDULER else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        return StoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> StorePromMetrics:
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class EPDTieredConnector(EPDStoreConnector):
    """The memory of a node before a volume's files; an answer waits for both."""

    store = "ECTieredConnector"

    def _config(self, vllm_config: Any) -> ECTransferConfig:
        config = super()._config(vllm_config)
        if config.ec_connector_extra_config.get("write", "through") != "through":
            raise ECConfigError("ec_connector_extra_config key 'write' must be 'through' in vLLM")
        return config
