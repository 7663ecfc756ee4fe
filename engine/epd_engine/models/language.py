"""The language side, which is the same for all families: a text model of transformers and its head."""

from typing import Any

import torch
from torch import nn

from epd_engine.attention.packed_batch import ATTENTION_NAME, PackedBatch
from epd_engine.layers.linear import linear_of
from epd_engine.models.checkpoint import CheckpointError


class LanguageModel(nn.Module):
    """Runs packed tokens over the paged KV."""

    def __init__(self, model: Any, tied: bool):
        """`model` is a module that takes embeddings and gives hidden states (`Qwen2Model` and its like); the
        checkpoint of a `tied` one has no tensor for the head."""
        super().__init__()
        config = model.config
        self.model = model
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.model.set_attn_implementation(ATTENTION_NAME)

    def give_head(self) -> None:
        """To a model that has none of its own: the token embedding, as a layer like all others."""
        if self.lm_head is None:
            self.lm_head = linear_of(self.model.embed_tokens.weight)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[tokens]` to `[tokens, width]`."""
        embeds: torch.Tensor = self.model.embed_tokens(token_ids)
        return embeds

    def hidden(self, embeds: torch.Tensor, positions: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """`[tokens, width]` at `[axes, tokens]` to `[rows, hidden]`, of those tokens that `batch` wants."""
        out = self.model(
            inputs_embeds=embeds[None],
            # A row of a batch of one; models with several axes take them before the batch.
            position_ids=positions if len(positions) == 1 else positions[:, None],
            attention_mask={"full_attention": None},  # the paged attention makes its own
            use_cache=False,
            batch=batch,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        if batch.wanted is None or len(hidden) == len(batch.wanted):  # the last layer may have chosen already
            return hidden
        return hidden[batch.wanted]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` to `[rows, vocab]`."""
        assert self.lm_head is not None, "weights are not loaded"
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


def check_attention(text_config: Any) -> None:
    """Raises `CheckpointError` for attention that the paged KV does not know."""
    if "sliding_attention" in text_config.layer_types:
        raise CheckpointError("sliding-window attention (use_sliding_window) is not supported")
