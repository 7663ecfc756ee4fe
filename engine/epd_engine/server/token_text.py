"""The text and the bytes of single tokens, which may be parts of a character."""

import re
from functools import lru_cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"


class TokenText:
    """Reads tokens of byte-level and of SentencePiece vocabularies."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._added = tokenizer.added_tokens_decoder
        self.of = lru_cache(1 << 15)(self._of)

    def _of(self, token_id: int) -> tuple[str, bytes]:
        """Text, with U+FFFD for what is no whole character, and the bytes themselves."""
        data = self._bytes(token_id)
        return data.decode("utf-8", "replace"), data

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""  # a row of the embedding that the tokenizer does not use
        if self._is_byte_level and all(char in BYTE_OF_CHAR for char in token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        return str(token).replace(_SENTENCEPIECE_SPACE, " ").encode()


def _byte_of_char() -> dict[str, int]:
    """How byte-level BPE writes bytes as printable characters (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + at): b for at, b in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
