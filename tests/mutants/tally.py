"""Counters of what was tried that outlive the process that tried it."""

from __future__ import annotations

import mmap
import struct

_COUNTERS = struct.Struct("qq")
_CHECK = 128


class Tally:
    """Shared with the processes forked after it was made: a planted bug may end them."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _COUNTERS.size + _CHECK)

    def count(self, operations: int) -> None:
        """One more example, of so many operations."""
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
        """The check that is running."""
        return self._memory[_COUNTERS.size :].rstrip(b"\0").decode()

    @check.setter
    def check(self, name: str) -> None:
        self._memory[_COUNTERS.size :] = name.encode()[:_CHECK].ljust(_CHECK, b"\0")
