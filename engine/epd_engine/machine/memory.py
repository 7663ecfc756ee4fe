"""How the memory of a device is divided: weights and encoder cache first, and KV from what they leave."""

from dataclasses import dataclass

from epd_engine.machine.device import DeviceError

CONTEXTS = 4  # of full length that KV has room for where nobody says how much, if memory allows
KV_SHARE = 0.5  # of what weights leave, that KV then takes at most: steps and media need some, too


@dataclass(frozen=True)
class MemoryNeeds:
    """In bytes. `kv_token` is what one token of context takes, 0 for a role without KV."""

    weights: int
    encoder_cache: int
    kv_token: int


def kv_tokens(needs: MemoryNeeds, free: int, context: int, asked: int | None) -> int:
    """Tokens of KV: `asked`, or else room for some requests of `context` tokens, one of them at least.

    Raises `DeviceError`, with the sums, where `free` bytes are too few.
    """
    fixed = needs.weights + needs.encoder_cache
    least = asked or context
    if fixed + least * needs.kv_token > free:
        raise DeviceError(_refusal(needs, free, least, is_asked=asked is not None))
    if asked is not None or not needs.kv_token:
        return least
    return max(context, min(CONTEXTS * context, int((free - fixed) * KV_SHARE) // needs.kv_token))


def _refusal(needs: MemoryNeeds, free: int, tokens: int, is_asked: bool) -> str:
    kv = tokens * needs.kv_token
    parts = [f"{_gib(needs.weights)} for weights"]
    if needs.encoder_cache:
        parts.append(f"{_gib(needs.encoder_cache)} for cached encoder outputs")
    if kv:
        parts.append(f"{_gib(kv)} for KV of {tokens} tokens")
    needed = needs.weights + needs.encoder_cache + kv
    message = f"this takes at least {_gib(needed)} ({', '.join(parts)}), and {_gib(free)} is free here: "
    if needed - kv <= free:
        return (
            message
            + f"lower {'--kv-cache-tokens' if is_asked else '--max-model-len'}, or give it more memory"
        )
    return message + "give it more memory, or a smaller model"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
