"""The shared-memory form of the EC store: one arena a producer, in a directory on a tmpfs.

An arena is one file that its producer alone writes and that any process of the node maps: entries are
ranges of bytes in it, found through a small index by key. Mapped and faulted in once, it costs a copy to
read and a copy to write, where a file or a segment for each entry costs a page fault for every 4 KiB.

What if a peer is slow, dead, restarted or lies?
- A reader copies out and then looks whether the entry is still the one it found: a producer that has reused
  the bytes meanwhile costs a miss.
- A producer that dies before an entry is linked into the index leaves nothing that a reader could find.
- A producer's lock on its arena ends with the process, however it ends: whoever sweeps next removes the
  arena. Readers that have it mapped may go on reading.
- A reader believes no number: the arena's geometry and each entry's are checked against the file's size.
"""

from epd_engine.ec_store.arena.directory import sweep
from epd_engine.ec_store.arena.usage import MemoryUsage, memory_usage

__all__ = ["MemoryUsage", "memory_usage", "sweep"]
