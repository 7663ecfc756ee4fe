"""Choosing tokens from logits."""

import torch

from epd_engine.core.request import Request


class Sampler:
    """Greedy and nucleus sampling; keeps one generator per seeded request while it lives."""

    def __init__(self) -> None:
        self._generators: dict[str, torch.Generator] = {}

    def sample(self, request: Request, logits: torch.Tensor) -> int:
        """One token id from `logits` `[vocab]`."""
        sampling = request.sampling
        if sampling.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1)
        if sampling.top_p < 1:
            probabilities = _nucleus(probabilities, sampling.top_p)
        return int(torch.multinomial(probabilities, 1, generator=self._generator(request, logits.device)))

    def forget(self, request_id: str) -> None:
        self._generators.pop(request_id, None)

    def _generator(self, request: Request, device: torch.device) -> torch.Generator | None:
        if request.sampling.seed is None:
            return None
        if request.request_id not in self._generators:
            generator = torch.Generator(device)
            generator.manual_seed(request.sampling.seed)
            self._generators[request.request_id] = generator
        return self._generators[request.request_id]


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zeroes all but the smallest set of tokens that holds `top_p` of the mass (arXiv 1904.09751)."""
    ordered, order = probabilities.sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered[before >= top_p] = 0
    return torch.zeros_like(probabilities).scatter(-1, order, ordered)
