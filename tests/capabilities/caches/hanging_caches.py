"""Caches with endless loops of different kinds."""

from __future__ import annotations

from contextlib import suppress
from time import sleep
from typing import TYPE_CHECKING

from .paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class HangsOnTheThirdBlock(PagedCache):
    """Never ends its search for a third free block."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        while self.spec.num_blocks - len(self.unused) > 2:
            self.spin()

    def spin(self) -> None:
        with suppress(Exception):
            sum(range(1000))


class CatchesEverything(HangsOnTheThirdBlock):
    """Catches every error, so that no signal ends it, and uses hardly any processor time."""

    def spin(self) -> None:
        with suppress(BaseException):
            sleep(0.001)


class HoldsTheInterpreterLock(HangsOnTheThirdBlock):
    """Holds the interpreter lock while it hangs in native code."""

    def spin(self) -> None:
        sum(range(10**12))
