"""vLLM's scheduler and its V2 runner's EC code around our connector; run by vLLM's Python.

    python contract_program.py MODEL FOLDER      runs every `case_*` below; prints {name: "" or what failed}

The V2 runner itself needs triton, and so a GPU. What is here are its own scheduler, requests and connector
wrapper (`ActiveECConnector`); an encoder is a function of the item's key.
"""

import json
import pickle
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput, make_empty_encoder_model_runner_output
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

from vllm import SamplingParams

MODEL, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
KEY, OTHER = "ab" * 32, "cd" * 32
GRID = [1, 4, 4]  # 4 embeddings
BLOCK = 16


class Instance:
    """One instance: vLLM's scheduler, and what its V2 worker does with the encoder cache in a step."""

    def __init__(self, role: str, store: Path, *, connector: str = "EPDStoreConnector"):
        extra: dict[str, Any] = {"shared_storage_path": str(store)}
        if connector == "EPDTieredConnector":
            memory = Path("/dev/shm") / f"epd-contract-{store.parent.name}-{store.name}"
            memory.mkdir(exist_ok=True)
            extra = {"memory": {"path": str(memory), "capacity": 8 << 20}, "storage": extra}
        self.config = EngineArgs(
            model=str(MODEL),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=4,
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,
            ec_transfer_config={
                "ec_connector": connector,
                "ec_role": role,
                "ec_connector_module_path": "epd_engine.vllm.connector",
                "ec_connector_extra_config": extra,
            },
        ).create_engine_config()
        self.config.cache_config.num_gpu_blocks = 64
        ec_transfer_state._EC_CONNECTOR_AGENT = None
        ec_transfer_state.ensure_ec_transfer_initialized(self.config)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        groups = [] if role == "ec_producer" else [KVCacheGroupSpec(["layer"], spec)]
        kv_cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = Scheduler(
            self.config, kv_cache, StructuredOutputManager(self.config), block_size=BLOCK, log_stats=True
        )
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self.worker = ActiveECConnector(self.config, self.encoder_cache)
        self.is_encoder = role == "ec_producer"
        self._requests = 0
        self._stats: dict[str, float] = {}

    def stats(self) -> dict[str, float]:
        """What vLLM's metrics were told since the start."""
        return self._stats

    def add(self, *features: MultiModalFeatureSpec) -> Request:
        self._requests += 1
        end = max(one.mm_position.offset + one.mm_position.length for one in features) + 1
        request = Request(
            f"r{self._requests}", list(range(1, end + 1)), SamplingParams(max_tokens=1), None,
            mm_features=list(features),
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def step(self, before_worker: Callable[[], None] = lambda: None) -> list[Any]:
        """One engine step; what it said about requests."""
        planned = self.scheduler.schedule()
        before_worker()
        planned.ec_connector_metadata = pickle.loads(pickle.dumps(planned.ec_connector_metadata))
        with self.worker.maybe_get_output(planned) as ec_output:
            self._encode(planned)
            self.gathered = {key: tensor.clone() for key, tensor in self.encoder_cache.items()}
        output = self._sampled(planned)
        output.ec_connector_output = pickle.loads(pickle.dumps(ec_output))
        outputs = self.scheduler.update_from_output(planned, output)
        for client in outputs.values():
            for name, value in (
                (client.scheduler_stats and client.scheduler_stats.ec_connector_stats) or {}
            ).items():
                self._stats[name] = self._stats.get(name, 0) + value
        return [one for client in outputs.values() for one in client.outputs]

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.ec_connector.shutdown()

    def _encode(self, planned: SchedulerOutput) -> None:
        for key in planned.free_encoder_mm_hashes:
            self.encoder_cache.pop(key, None)
        for request_id, indices in planned.scheduled_encoder_inputs.items():
            for index in indices:
                feature = self.scheduler.requests[request_id].mm_features[index]
                assert "pixel_values" in feature.data, "asked to encode an item without pixels"
                self.encoder_cache[feature.identifier] = encoded(
                    feature.identifier, feature.mm_position.length
                )

    def _sampled(self, planned: SchedulerOutput) -> ModelRunnerOutput:
        if self.is_encoder:
            return make_empty_encoder_model_runner_output(planned)
        ids = list(planned.num_scheduled_tokens)
        tokens: list[list[int]] = [[7] for _ in ids]
        return ModelRunnerOutput(ids, {one: i for i, one in enumerate(ids)}, sampled_token_ids=tokens)


def encoded(key: str, rows: int = 4) -> torch.Tensor:
    return torch.rand(rows, 128, generator=torch.Generator().manual_seed(sum(key.encode())))


def picture(key: str, *, pixels: bool, offset: int = 1, grid: list[int] = GRID) -> MultiModalFeatureSpec:
    data = {"image_grid_thw": torch.tensor(grid)}
    if pixels:
        data["pixel_values"] = torch.zeros(grid[1] * grid[2], 1176)
    fields = {
        name: MultiModalFieldElem(data=one, field=MultiModalBatchedField()) for name, one in data.items()
    }
    length = grid[0] * grid[1] * grid[2] // 4
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem(fields),
        modality="image",
        identifier=key,
        mm_position=PlaceholderRange(offset=offset, length=length),
        mm_hash=key,
    )


def publish(store: Path, *keys: str, **options: Any) -> list[Any]:
    encoder = Instance("ec_producer", store, **options)
    for key in keys:
        encoder.add(picture(key, pixels=True))
    said = encoder.step()
    encoder.close()
    return said


def entry(store: Path, key: str = KEY) -> Path:
    (found,) = store.glob(f"*/{key}/encoder_cache.safetensors")
    return found


def case_an_encoder_publishes_before_it_answers(store: Path) -> None:
    said = publish(store, KEY)
    expected = {KEY: {"item_indices": [0], "metadata": {"image_grid_thw": GRID}}}
    assert [strip(one.ec_transfer_params) for one in said] == [expected], said
    assert entry(store).exists()


def case_a_pd_gets_what_the_encoder_published(store: Path) -> None:
    publish(store, KEY)
    pd = Instance("ec_consumer", store)
    pd.add(picture(KEY, pixels=False))
    said = until_said(pd)
    assert said[0].new_token_ids == [7], said
    assert torch.equal(pd.gathered[KEY], encoded(KEY))


def case_metrics_say_what_was_saved_and_loaded(store: Path) -> None:
    encoder, pd = Instance("ec_producer", store), Instance("ec_consumer", store)
    ec_transfer_state._EC_CONNECTOR_AGENT = encoder.worker.ec_connector
    encoder.add(picture(KEY, pixels=True))
    until_said(encoder)
    said = encoder.stats()
    assert (said["ec_misses"], said["ec_saves"], said["ec_save_bytes/storage"]) == (1, 1, 4 * 128 * 4), said
    assert said["ec_save_seconds/storage"] > 0, said
    pd.add(picture(KEY, pixels=False))
    pd.add(picture(OTHER, pixels=False))
    until_said(pd, 2)
    said = pd.stats()
    assert (said["ec_external_hits"], said["ec_load_failures"]) == (1, 1), said
    assert said["ec_load_bytes/storage"] == 4 * 128 * 4, said


def case_a_miss_fails_one_request_and_the_next_one_is_served(store: Path) -> None:
    publish(store, KEY)
    pd = Instance("ec_consumer", store)
    lost = pd.add(picture(OTHER, pixels=False))
    served = pd.add(picture(KEY, pixels=False))
    said = until_said(pd, 2)
    assert {one.request_id: str(one.finish_reason) for one in said} == {
        lost.request_id: "error",
        served.request_id: "length",
    }, said
    assert not pd.scheduler.has_unfinished_requests()


def case_an_entry_that_goes_between_plan_and_load_is_loaded_all_the_same(store: Path) -> None:
    publish(store, KEY)
    pd = Instance("ec_consumer", store)
    pd.add(picture(KEY, pixels=False))
    said = until_said(pd, before_worker=lambda: shutil.rmtree(store))
    assert said[0].new_token_ids == [7], said
    assert torch.equal(pd.gathered[KEY], encoded(KEY))


def case_another_grid_of_the_same_size_is_a_miss_even_where_the_item_is_resident(store: Path) -> None:
    publish(store, KEY)
    pd = Instance("ec_consumer", store)
    pd.add(picture(KEY, pixels=False))
    until_said(pd)
    pd.add(picture(KEY, pixels=False, grid=[1, 2, 8]))
    (said,) = until_said(pd)
    assert str(said.finish_reason) == "error", said


def case_pixels_are_encoded_where_the_store_has_nothing(store: Path) -> None:
    pd = Instance("ec_consumer", store)
    pd.add(picture(KEY, pixels=True))
    (said,) = until_said(pd)
    assert said.new_token_ids == [7], said
    assert not list(store.rglob("*.safetensors")), "a consumer saves nothing"


def case_an_encoder_that_has_the_item_writes_it_again_after_the_store_was_cleaned(store: Path) -> None:
    encoder = Instance("ec_producer", store)
    encoder.add(picture(KEY, pixels=True))
    encoder.step()
    shutil.rmtree(entry(store).parent)
    encoder.add(picture(KEY, pixels=True))
    (said,) = until_said(encoder)
    assert KEY in said.ec_transfer_params, said
    assert entry(store).exists()


def case_an_encoder_that_took_the_item_from_the_store_writes_it_again_too(store: Path) -> None:
    publish(store, KEY)
    encoder = Instance("ec_producer", store)
    for _ in range(2):
        encoder.add(picture(KEY, pixels=True))
        (said,) = until_said(encoder)
        assert KEY in said.ec_transfer_params, said
        shutil.rmtree(entry(store).parent)
    assert encoder.scheduler.ec_connector._scheduler.take_stats() is not None


def case_a_save_that_fails_is_left_out_of_the_answer(store: Path) -> None:
    encoder = Instance("ec_producer", store)
    shutil.rmtree(store, ignore_errors=True)
    store.write_text("a file where the volume was")
    encoder.add(picture(KEY, pixels=True))
    (said,) = until_said(encoder)
    assert said.ec_transfer_params == {}, said
    store.unlink()
    encoder.add(picture(KEY, pixels=True))


def case_a_key_that_is_no_key_is_neither_stored_nor_looked_for(store: Path) -> None:
    said = publish(store, "../elsewhere/x")
    assert said[0].ec_transfer_params == {}, said
    assert not [path for path in FOLDER.rglob("*") if "elsewhere" in str(path)]
    pd = Instance("ec_consumer", store)
    pd.add(picture("../elsewhere/x", pixels=False))
    (answer,) = until_said(pd)
    assert str(answer.finish_reason) == "error", answer


def case_values_that_are_no_numbers_are_not_published(store: Path) -> None:
    encoder = Instance("ec_producer", store)
    encoder._encode = lambda planned: encoder.encoder_cache.update({KEY: torch.full((4, 128), torch.nan)})
    encoder.add(picture(KEY, pixels=True))
    (said,) = until_said(encoder)
    assert said.ec_transfer_params == {}, said


def case_tiers_publish_in_both_and_load_from_memory(store: Path) -> None:
    encoder = Instance("ec_producer", store, connector="EPDTieredConnector")
    encoder.add(picture(KEY, pixels=True))
    (said,) = until_said(encoder)
    assert KEY in said.ec_transfer_params, said
    shutil.rmtree(store)
    pd = Instance("ec_consumer", store, connector="EPDTieredConnector")
    pd.add(picture(KEY, pixels=False))
    (answer,) = until_said(pd)
    assert answer.new_token_ids == [7], answer
    assert torch.equal(pd.gathered[KEY], encoded(KEY))
    encoder.close()
    pd.close()


def case_room_made_by_evicting_what_the_same_request_needs_ends_well(store: Path) -> None:
    third = "ef" * 32
    publish(store, KEY, OTHER, third)
    pd = Instance("ec_consumer", store)
    pd.scheduler.encoder_cache_manager = EncoderCacheManager(8)  # two pictures
    for key in (KEY, OTHER):
        pd.add(picture(key, pixels=False))
        until_said(pd)
    pd.add(picture(third, pixels=False), picture(KEY, pixels=False, offset=6))  # KEY is the first to go
    (said,) = until_said(pd)
    assert said.new_token_ids == [7], said
    assert torch.equal(pd.gathered[KEY], encoded(KEY))


def case_an_encoder_cache_that_was_reset_is_filled_again(store: Path) -> None:
    publish(store, KEY)
    pd = Instance("ec_consumer", store)
    for _ in range(2):
        pd.add(picture(KEY, pixels=False))
        (said,) = until_said(pd)
        assert said.new_token_ids == [7], said
        pd.scheduler.encoder_cache_manager.reset()
        pd.encoder_cache.clear()


def case_both_roles_in_one_instance_publish_what_they_compute_and_load_what_is_there(store: Path) -> None:
    publish(store, KEY)
    both = Instance("ec_both", store)
    both.add(picture(KEY, pixels=False), picture(OTHER, pixels=True, offset=6))
    (said,) = until_said(both)
    assert said.new_token_ids == [7], said
    assert torch.equal(both.gathered[KEY], encoded(KEY))
    assert entry(store, OTHER).exists()


def case_a_request_that_is_aborted_leaves_nothing_behind(store: Path) -> None:
    pd = Instance("ec_consumer", store)
    request = pd.add(picture(KEY, pixels=False))
    side = pd.scheduler.ec_connector._scheduler
    side.ensure_cache_available(request, 0)
    pd.scheduler.finish_requests(request.request_id, pd_aborted())
    assert side._courses == {}
    until_said(pd, 0)


def pd_aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def strip(answer: dict[str, Any]) -> dict[str, Any]:
    """vLLM 0.33 says the modality, too."""
    return {key: {k: v for k, v in said.items() if k != "modality"} for key, said in answer.items()}


def until_said(
    instance: Instance, count: int = 1, before_worker: Callable[[], None] = lambda: None
) -> list[Any]:
    """Steps until `count` requests have ended; loads may defer some."""
    said: list[Any] = []
    for _ in range(2000):
        said += [one for one in instance.step(before_worker) if one.finish_reason is not None]
        if len(said) >= count:
            return said
    raise AssertionError(f"only {len(said)} of {count} requests have ended: {said}")


def main() -> None:
    results = {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            store = FOLDER / name
            store.mkdir(parents=True)
            try:
                case(store)
                results[name] = ""
            except Exception:  # noqa: BLE001 - whatever it is, it is the result
                results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
