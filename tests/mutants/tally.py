"""Counters of a search that outlive its process."""

from __future__ import annotations

import mmap
import struct

_COUNTERS = struct.Struct("qq")
_CHECK = 128


class Tally:
    """Counters in memory shared with later forks, because a planted bug may end those."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _COUNTERS.size + _CHECK)

    def count(self, operations: int) -> None:
        """Count one more example with its operations."""
        examples, done = _COUNTERS.unpack_from(self._memory)
        _COUNTERS.pack_into(self._memory, 0, examples + 1, done + operations)

    @property
    def examples(self) -> int:
        return int(_COUNTERS.unpack_from(self._memory)[0])

    @property
    def operations(self) -> int:
        return int(_COUNTERS.unpack_from(self._memory)[1])

    @property
    def check(self) -> str:
        """Name of the running check."""
        return self._memory[_COUNTERS.size :].rstrip(b"\0").decode()

    @check.setter
    def check(self, name: str) -> None:
        self._memory[_COUNTERS.size :] = name.encode()[:_CHECK].ljust(_CHECK, b"\0")
