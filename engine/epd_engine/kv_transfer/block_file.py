"""KV of a range of a prompt's blocks: a safetensors file with a tensor `layer.<n>` for each layer, of shape
`[2, blocks, kv_heads, block_size, head_dim]`, keys first.

Layers go into a temporary file as they are computed; the header, whose length is known before, comes last,
with a checksum for each layer. A reader knows what the header must say, and takes nothing else.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from epd_engine.ec_store.entry import payload_view
from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.header import CHECKSUM, ITEM_BYTES
from epd_engine.ec_store.layout import (
    make_directory,
    open_new,
    read_into,
    sync_directory,
    temporary_name,
)
from epd_engine.kv_transfer.base import KVModelIdentity

FORMAT = "epd-kv-1"
_ALIGNMENT = 64
_NO_CHECKSUM = "0" * 32
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class BlockRange:
    """Blocks `[first, end)` of the prompt whose `prompt_digest` is `digest`."""

    identity: KVModelIdentity
    digest: str
    first: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.first:06d}-{self.end:06d}.safetensors"

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of one layer."""
        said = self.identity
        return (2, self.end - self.first, said.kv_heads, said.block_size, said.head_dim)

    @property
    def layer_bytes(self) -> int:
        return (self.end - self.first) * self.identity.layer_bytes_per_block

    def header(self, checksums: list[str]) -> bytes:
        """Length, JSON and padding; as long whatever the checksums."""
        dtype = _DTYPE_NAMES[self.identity.dtype]
        assert ITEM_BYTES[dtype] == self.identity.dtype.itemsize
        document: dict[str, Any] = {
            "__metadata__": {
                "format": FORMAT,
                "compatibility": json.dumps(self.identity.compatibility, sort_keys=True),
                "prompt": self.digest,
                "blocks": f"{self.first}-{self.end}",
                "checksum_algorithm": CHECKSUM,
                "checksums": " ".join(checksums),
            }
        }
        for layer in range(self.identity.num_layers):
            begin = layer * self.layer_bytes
            offsets = [begin, begin + self.layer_bytes]
            document[f"layer.{layer}"] = {"dtype": dtype, "shape": self.shape, "data_offsets": offsets}
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def blank_header(self) -> bytes:
        return self.header([_NO_CHECKSUM] * self.identity.num_layers)


class BlockFileWriter:
    """One file on its way to its name. Not thread-safe. Methods raise OSError; then `discard`."""

    def __init__(self, blocks: BlockRange, directory: Path):
        """`directory` is made where it is not there, with the one above it."""
        self._blocks, self._directory = blocks, directory
        self._offset = len(blocks.blank_header())
        self._checksums = [_NO_CHECKSUM] * blocks.identity.num_layers
        try:
            make_directory(directory)
        except FileNotFoundError:
            make_directory(directory.parent)
            make_directory(directory)
        self._temporary: Path | None = directory / temporary_name()
        self._descriptor = open_new(str(self._temporary))

    def write(self, layer: int, tensor: torch.Tensor) -> None:
        """`tensor` is a contiguous CPU tensor of the range's shape."""
        payload = payload_view(tensor)
        self._checksums[layer] = xxhash.xxh3_128_hexdigest(payload)
        _write_at(self._descriptor, payload, self._offset + layer * self._blocks.layer_bytes)

    def publish(self, fsync: bool) -> None:
        """Every layer has been written: the file gets its name."""
        assert self._temporary is not None, "published once"
        _write_at(self._descriptor, memoryview(self._blocks.header(self._checksums)), 0)
        if fsync:
            os.fdatasync(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
        os.replace(self._temporary, self._directory / self._blocks.name)
        self._temporary = None
        if fsync:
            sync_directory(self._directory)
            sync_directory(self._directory.parent)

    def discard(self) -> None:
        """Leaves nothing of what was not published."""
        try:
            if self._descriptor >= 0:
                descriptor, self._descriptor = self._descriptor, -1
                os.close(descriptor)
            if self._temporary is not None:
                os.unlink(self._temporary)
        except OSError:
            return  # it goes with its directory


def read_blocks(blocks: BlockRange, path: Path, skip: int = 0) -> Iterator[torch.Tensor]:
    """The layers in order, each on the CPU and without its first `skip` blocks; a tensor is good until the
    next is asked for. Raises `EntryDamaged` for a file that is not exactly what `blocks` says, or OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        length = len(blocks.blank_header())
        wanted = length + blocks.identity.num_layers * blocks.layer_bytes
        if (size := os.fstat(descriptor).st_size) != wanted:
            raise EntryDamaged(f"the file has {size} bytes, expected {wanted}")
        header = bytearray(length)
        read_into(descriptor, memoryview(header), 0)
        checksums = _checksums(bytes(header))
        if len(checksums) != blocks.identity.num_layers or blocks.header(checksums) != header:
            raise EntryDamaged("the header is another prompt's, another model's, or altered")
        buffer = torch.empty(blocks.shape, dtype=blocks.identity.dtype)
        payload = payload_view(buffer)
        for layer, checksum in enumerate(checksums):
            read_into(descriptor, payload, length + layer * blocks.layer_bytes)
            if xxhash.xxh3_128_hexdigest(payload) != checksum:
                raise EntryDamaged(f"layer {layer} does not match its checksum")
            yield buffer[:, skip:]
    finally:
        os.close(descriptor)


def gather(
    layer: tuple[torch.Tensor, torch.Tensor], block_ids: torch.Tensor, tokens_in_last: int
) -> torch.Tensor:
    """A copy on the CPU of the blocks' keys and values `[2, blocks, kv_heads, block_size, head_dim]`. Of the
    last block only `tokens_in_last` tokens are real: the rest, another request's once, becomes zeros."""
    picked = layer[0].new_empty((2, len(block_ids), *layer[0].shape[1:]))
    for part, place in zip(layer, picked, strict=True):
        torch.index_select(part, 0, block_ids, out=place)
    picked[:, -1, :, tokens_in_last:] = 0
    return picked.cpu()


def _write_at(descriptor: int, payload: memoryview, offset: int) -> None:
    done = 0
    while done < len(payload):
        done += os.pwrite(descriptor, payload[done:], offset + done)


def _checksums(header: bytes) -> list[str]:
    """What the header says they are; the rest of it is compared as a whole."""
    try:
        said: str = json.loads(header[8:])["__metadata__"]["checksums"]
        return said.split(" ")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EntryDamaged(f"the header cannot be read: {error!r:.200}") from error
