"""All arenas of one directory, as one store to read from."""

import logging
from pathlib import Path

import torch

from epd_engine.ec_store.arena.directory import ArenaDirectory
from epd_engine.ec_store.arena.reader import ArenaReader, Located, verify
from epd_engine.ec_store.arena.tensors import copied, digest
from epd_engine.ec_store.entry import EntryHeader, Expectation
from epd_engine.ec_store.errors import EntryDamaged, EntryMissing, StoreUnavailable
from epd_engine.ec_store.keys import check_key

log = logging.getLogger(__name__)

_TRIES = 3


class MemoryStore:
    """Finds and loads entries of any producer of this node. Not thread-safe.

    `directory` may appear, and producers may come and go, at any time. `verify` checks each load against the
    entry's checksum, where its producer has stored one.
    """

    def __init__(self, directory: Path, *, verify: bool = False):
        self.directory, self._verify = directory, verify
        self._arenas = ArenaDirectory(directory)
        self._names: tuple[str, ...] = ()
        self._readers: dict[str, ArenaReader] = {}
        self._refused: set[str] = set()

    @property
    def num_arenas(self) -> int:
        """How many producers there are, those of dead processes included until they are swept."""
        return len(self._arenas.names())

    def probe(self, key: str, expected: Expectation, *, deep: bool = False) -> EntryHeader:
        """The header of a usable entry; `deep` reads the payload against its checksum too.

        Raises `EntryMissing`, `EntryDamaged` or `InvalidKey`.
        """
        reader, located = self._find(key)
        expected.check(located.header)
        if deep:
            verify(located.tensor, located)
            if not reader.is_current(located):
                raise EntryMissing(f"no entry {key}")
        return located.header

    def load(
        self, key: str, expected: Expectation, device: torch.device, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A tensor `[num_embeds, width]` of the entry's dtype on `device`, by one copy out of the arena.

        `into` takes the copy where it is given; it has the entry's shape and dtype. Raises as `probe` does.
        """
        for _ in range(_TRIES):
            reader, located = self._find(key)
            expected.check(located.header)
            if into is None:
                target = torch.empty(located.header.shape, dtype=located.tensor.dtype, device=device)
            else:
                target = into
            intact = self._copy_out(located, target)
            if reader.is_current(located):
                if not intact:
                    raise EntryDamaged("the payload does not match its checksum")
                return target
        raise EntryMissing(f"the entry {key} was replaced while it was read")

    def _copy_out(self, located: Located, target: torch.Tensor) -> bool:
        """Whether what arrived in `target` is what was stored, as far as that is checked."""
        if not self._verify or located.checksum is None or target.device.type != "cpu":
            target.copy_(located.tensor)
            return True
        if target.is_contiguous():
            return copied(target, located.tensor) == located.checksum
        target.copy_(located.tensor)
        return digest(target) == located.checksum

    def _find(self, key: str) -> tuple[ArenaReader, Located]:
        check_key(key)
        names = self._arenas.names()
        if names != self._names:
            self._map_anew(names)
        damage = None
        for reader in self._readers.values():
            try:
                located = reader.find(key)
            except EntryDamaged as error:
                damage = error
                continue
            if located is not None:
                return reader, located
        raise damage or EntryMissing(f"no entry {key}")

    def _map_anew(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._readers = {name: reader for name, reader in self._readers.items() if name in names}
        self._refused &= set(names)
        for name in names:
            if name in self._readers or name in self._refused:
                continue
            try:
                self._readers[name] = ArenaReader(self.directory / name)
            except (EntryDamaged, StoreUnavailable) as error:
                log.warning("an arena is left out: %s", error)
                self._refused.add(name)
