"""Prefix caches whose prompts are reserved before they are computed: a right one, broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer import CacheFull
from tests.capabilities.caches.text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer import CacheSpec

    Reservation = list[tuple[int, Sequence[int]]]
    """Sequences, and the tokens that each is to get."""


class ReservingCache(TextCache):
    """Begins a prompt with what is found, reserves room for the rest, and may be cancelled.

    It is right.
    """

    cancels_reservations = True
    head_counts = (1, 2)
    head_dims = (4,)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.reserved: dict[int, list[int]] = {}
        """Tokens that are not written, by sequence."""

    def reserve(self, seqs: Sequence[int], counts: Sequence[int]) -> Reservation:
        size, needed = self.spec.block_size, {}
        for seq, count in zip(seqs, counts, strict=True):
            stored = len(self.token_ids.get(seq, ())) + len(self.reserved.get(seq, ()))
            needed[seq] = -(-(stored + count) // size) - len(self.tables.get(seq, ()))
        if sum(needed.values()) > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        reservation = list(zip(seqs, self.row_tokens, strict=True))
        for seq, token_ids in reservation:
            self.token_ids.setdefault(seq, [])
            self.tables.setdefault(seq, []).extend(self.open() for _ in range(needed[seq]))
            self.reserved.setdefault(seq, []).extend(token_ids)
        return reservation

    def fill(self, reservation: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        size, row = self.spec.block_size, 0
        for seq, token_ids in reservation:
            del self.reserved[seq][: len(token_ids)]
            stored, table = self.token_ids[seq], self.tables[seq]
            for token in token_ids:
                at, position = divmod(len(stored), size)
                self.keys[:, table[at], :, position] = key[:, row]
                self.values[:, table[at], :, position] = value[:, row]
                stored.append(token)
                row += 1
                if position == size - 1:
                    self.register_at(seq, at)

    def register_at(self, seq: int, at: int) -> None:
        """Register a full block of a sequence, which may have later ones."""
        table, up_to = self.tables[seq], self.tables[seq][: at + 1]
        self.register(up_to, self.token_ids[seq][: (at + 1) * self.spec.block_size])
        table[at] = up_to[-1]

    def free(self, seq: int) -> None:
        self.reserved.pop(seq, None)
        super().free(seq)


class KeepsTheTextOfCancelled(ReservingCache):
    """S5: keeps the blocks of a cancelled prompt for later texts, though they were not written."""

    def free(self, seq: int) -> None:
        self.token_ids[seq] += self.reserved.get(seq, ())
        for at in range(len(self.token_ids[seq]) // self.spec.block_size):
            self.register_at(seq, at)
        super().free(seq)


class LeaksReservedBlocks(ReservingCache):
    """S5: frees only the written blocks of a cancelled prompt."""

    def free(self, seq: int) -> None:
        del self.tables[seq][-(-len(self.token_ids[seq]) // self.spec.block_size) :]
        super().free(seq)


class FillsTheNextOfTheName(ReservingCache):
    """S5: leaves the reserved tokens of a cancelled prompt to the next sequence of its name."""

    def free(self, seq: int) -> None:
        TextCache.free(self, seq)


BROKEN = (KeepsTheTextOfCancelled, LeaksReservedBlocks, FillsTheNextOfTheName)
