"""What each role holds, does and refuses."""

import httpx
import pytest

from tests.support.digits import shipped, user
from tests.support.epd_client import ask, ask_epd, prime, rewritten, text
from tests.support.processes import Server

QUESTION = [user(shipped("seven"), "What digit is this?")]


def parameters(server: Server) -> float:
    return server.metric("epd_engine_model_parameters")


def test_encoder_and_pd_split_the_model_between_them(encoder: Server, pd: Server, aggregated: Server) -> None:
    assert 0 < parameters(encoder) < parameters(aggregated)
    assert 0 < parameters(pd) < parameters(aggregated)
    assert parameters(encoder) + parameters(pd) == parameters(aggregated)


def test_the_pd_never_decodes_a_picture_nor_runs_a_tower(encoder: Server, pd: Server) -> None:
    loads = pd.metric("epd_engine_ec_loads_total")
    fresh = [user(shipped("seven").rotate(3), "What digit is this?")]
    assert text(ask_epd(encoder, pd, fresh))
    assert pd.metric("epd_engine_ec_loads_total") == loads + 1
    assert pd.metric("epd_engine_media_decoded_total") == 0
    assert pd.metric("epd_engine_encoder_items_total") == 0


def test_the_encoder_has_no_kv_cache_and_samples_nothing(encoder: Server) -> None:
    prime(encoder, QUESTION)
    assert encoder.metric("epd_engine_prompt_tokens_total") == 0
    assert encoder.metric("epd_engine_generated_tokens_total") == 0


def test_an_encoder_refuses_a_request_without_media(encoder: Server) -> None:
    """Answering 200 with nothing in it, as seen elsewhere, hides a misrouted request."""
    answer = ask(encoder, [{"role": "user", "content": "hello"}])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "no_media"


def test_a_pd_without_tower_refuses_raw_media_and_says_what_to_do(pd: Server) -> None:
    answer = ask(pd, QUESTION)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "no_encoder"
    assert "--ec-miss compute" in answer.json()["error"]["message"]


def test_an_aggregated_server_refuses_stored_items(encoder: Server, aggregated: Server) -> None:
    answer = ask(aggregated, rewritten(QUESTION, prime(encoder, QUESTION)))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "no_ec_store"


def test_an_item_that_nobody_encoded_is_a_retryable_miss_streaming_or_not(
    encoder: Server, pd: Server
) -> None:
    (part,) = prime(encoder, QUESTION)
    for stream in (False, True):
        answer = ask(pd, rewritten(QUESTION, [{**part, "uuid": "0" * 64}]), stream=stream)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "ec_miss"


@pytest.mark.parametrize("grid", [[1, 2, 2], [1, 60, 60]])
def test_metadata_that_does_not_fit_the_stored_tensor_is_a_miss_and_never_a_crash(
    encoder: Server, pd: Server, grid: list[int]
) -> None:
    (part,) = prime(encoder, QUESTION)
    wrong = {**part, "image_embeds": {"image_grid_thw": grid}}
    answer = ask(pd, rewritten(QUESTION, [wrong]))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "ec_miss"
    assert httpx.get(f"{pd.url}/health").status_code == 200


def test_processor_options_make_another_item(encoder: Server) -> None:
    (default,) = prime(encoder, QUESTION)
    answer = ask(encoder, QUESTION, mm_processor_kwargs={"min_pixels": 784, "max_pixels": 3136})
    (key,) = answer.json()["ec_transfer_params"]
    assert key != default["uuid"]


def test_tenants_do_not_share_items(encoder: Server) -> None:
    keys = {
        next(iter(ask(encoder, QUESTION, cache_salt=salt).json()["ec_transfer_params"]))
        for salt in ("a", "b", "a")
    }
    assert len(keys) == 2


def test_a_clients_uuid_on_raw_media_is_no_key(encoder: Server) -> None:
    other = [user(shipped("three"), "")]
    for messages in (QUESTION, other):
        messages[0]["content"][0]["uuid"] = "same-name"
    keys = {prime(encoder, messages)[0]["uuid"] for messages in (QUESTION, other)}
    assert len(keys) == 2
