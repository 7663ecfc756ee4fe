"""From a request's fields and the checkpoint's defaults to sampling parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from epd_engine.core.request import RequestError
from epd_engine.core.sampling import Grammar, SamplingParams
from epd_engine.server.protocol import SamplingFields


@dataclass(frozen=True)
class SamplingDefaults:
    """What holds where a request says nothing: the checkpoint's `generation_config.json`, as in vLLM."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> "SamplingDefaults":
        """A checkpoint that does not sample is greedy; its penalty holds all the same."""
        penalty = float(generation.get("repetition_penalty") or 1.0)
        if not generation.get("do_sample", "temperature" in generation):
            return cls(temperature=0.0, repetition_penalty=penalty)
        return cls(
            temperature=float(_or(generation.get("temperature"), 1.0)),
            top_p=float(_or(generation.get("top_p"), 1.0)),
            top_k=int(_or(generation.get("top_k"), 0)),
            min_p=float(_or(generation.get("min_p"), 0.0)),
            repetition_penalty=penalty,
        )


def sampling_params(
    body: SamplingFields,
    defaults: SamplingDefaults,
    max_tokens: int,
    vocab_size: int,
    grammar: Grammar | None,
) -> SamplingParams:
    """Raises `RequestError` for tokens that the model does not have."""
    bias = {int(token): value for token, value in body.logit_bias.items() if value}
    for name, tokens in (("logit_bias", bias), ("stop_token_ids", body.stop_token_ids)):
        if unknown := next((token for token in tokens if token >= vocab_size), None):
            message = f"{name}: the model has {vocab_size} tokens, and {unknown} is not one of them"
            raise RequestError(400, "invalid_value", message, name)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(0, _or(body.top_k, defaults.top_k)),
        min_p=_or(body.min_p, defaults.min_p),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=bias,
        seed=body.seed,
        min_tokens=body.min_tokens,
        logprobs=body.top_logprobs if body.logprobs else None,
        grammar=grammar,
        stop=tuple(body.stop or ()),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
    )


def for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Parameters of one of `n` answers: answer i of seed s is the only answer of seed s + i, as in vLLM."""
    if sampling.seed is None or index == 0:
        return sampling
    seed = (sampling.seed + index + 2**63) % 2**64 - 2**63
    return replace(sampling, seed=seed)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
