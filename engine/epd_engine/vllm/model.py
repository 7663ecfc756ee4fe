"""vLLM's model as the store sees it: fingerprint, width and dtype of its entries, its media as our items."""

# mypy: disable-error-code="import-not-found"

import hashlib
from functools import lru_cache
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from epd_engine.core.request import MediaItem
from epd_engine.ec_store.errors import InvalidKey
from epd_engine.ec_store.keys import canonical_json, check_key
from epd_engine.ec_transfer.base import ECModelIdentity
from epd_engine.ec_transfer.config import ECConfigError
from epd_engine.models.checkpoint import Checkpoint, CheckpointError
from epd_engine.models.fingerprint import checkpoint_fingerprint


def model_identity(vllm_config: Any) -> ECModelIdentity:
    """Raises `ECConfigError` for a model whose weights cannot be read, or whose encoder is not as wide as
    its config says."""
    model = vllm_config.model_config
    width = _width(model)
    # What a producer has measured at start; vLLM 0.31 does not.
    widths: dict[str, int] = getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", {})
    for modality, measured in widths.items():
        if measured != width:
            raise ECConfigError(
                f"this model's encoder gives {modality} embeddings of width {measured} where {width} is "
                "expected from its config: it is not supported"
            )
    return ECModelIdentity(_fingerprint(model), width, model.dtype)


def _fingerprint(model: Any) -> str:
    """The checkpoint's; options of the instance that change what the encoder sees make it another one."""
    try:
        fingerprint = _of_checkpoint(model.model, model.revision)
    except (CheckpointError, OSError) as error:
        raise ECConfigError(f"the EC store needs the model's fingerprint: {error}") from error
    options = {
        "mm_processor_kwargs": getattr(model.multimodal_config, "mm_processor_kwargs", None),
        "hf_overrides": model.hf_overrides if isinstance(model.hf_overrides, dict) else None,
    }
    given = {name: value for name, value in options.items() if value}
    if not given:
        return fingerprint
    return hashlib.sha256(canonical_json([fingerprint, given]).encode()).hexdigest()


@lru_cache(4)
def _of_checkpoint(model: str, revision: str | None) -> str:
    return checkpoint_fingerprint(Checkpoint.find(model, revision))


def _width(model: Any) -> int:
    """Embedding width; DeepStack packs what several layers add behind what the first one takes."""
    tower = getattr(model.hf_config, "vision_config", None)
    added = getattr(tower, "deepstack_visual_indexes", None) or ()
    return int(model.hf_text_config.hidden_size) * (1 + len(added))


class Features:
    """vLLM's multimodal features, read."""

    def __init__(self, vllm_config: Any):
        self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)

    def item(self, feature: Any) -> MediaItem | None:
        """`feature` as an item of the store; None where its identifier is no key (an adapter's prefix, a
        client's own id): such an item is never stored, nor looked for."""
        try:
            key = check_key(feature.identifier)
        except InvalidKey:
            return None
        metadata = self.primer_answer([feature])[key]["metadata"]
        return MediaItem(feature.modality, key, feature.mm_position.get_num_embeds(), metadata)

    def is_computable(self, feature: Any) -> bool:
        """Whether the encoder's inputs are at hand, rather than metadata alone."""
        return feature.data is not None and bool(
            set(feature.data.keys()) - self._resolver.fields_for(feature.modality)
        )

    def primer_answer(self, features: list[Any]) -> dict[str, dict[str, Any]]:
        """`{key: {"item_indices", "metadata"}}`."""
        answer: dict[str, dict[str, Any]] = collect_ec_item_metadata(features, self._resolver)
        return answer
