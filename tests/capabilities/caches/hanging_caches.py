"""Caches with an endless loop, each of another kind."""

from __future__ import annotations

from contextlib import suppress
from time import sleep
from typing import TYPE_CHECKING

from .paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class HangsOnTheThirdBlock(PagedCache):
    """Its search for a free block does not end once it has handed out two."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        while self.spec.num_blocks - len(self.unused) > 2:
            self.spin()

    def spin(self) -> None:
        with suppress(Exception):
            sum(range(1000))


class CatchesEverything(HangsOnTheThirdBlock):
    """No error gets out of it, so no signal ends it. It uses hardly any processor time."""

    def spin(self) -> None:
        with suppress(BaseException):
            sleep(0.001)


class KeepsTheInterpretersLock(HangsOnTheThirdBlock):
    """No other thread runs while it hangs in native code."""

    def spin(self) -> None:
        sum(range(10**12))
