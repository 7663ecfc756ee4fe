"""Log probabilities in OpenAI's shape."""

from collections.abc import Sequence
from typing import Any

from epd_engine.core.sampling import TokenLogprobs
from epd_engine.server.token_text import TokenText

LOWEST = -9999.0  # JSON has no minus infinity


def logprobs_content(
    text: TokenText, token_ids: Sequence[int], said: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: one entry a token."""
    return [
        {
            **_entry(text, token, of_token.chosen),
            "top_logprobs": [_entry(text, *alternative) for alternative in of_token.top],
        }
        for token, of_token in zip(token_ids, said, strict=True)
    ]


def _entry(text: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    token, data = text.of(token_id)
    return {"token": token, "logprob": max(logprob, LOWEST), "bytes": list(data)}
