"""Caches whose windows are rings outside the prefix cache: a right one, and broken ones.

Full blocks of the layers without a window can be found; a layer with a window has the last tokens
of each sequence in the sequence's slot, where nothing can be found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from pytest_roseinfer import KVCacheAdapter, PrefixTraits, WindowTraits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import CacheSpec


@dataclass(slots=True)
class SlottedSequence:
    """The tokens of a sequence, and its slot."""

    slot: int
    ids: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    """``[2, layers, heads, head_dim]`` of each token, for layers without a window."""


class RingCache(KVCacheAdapter):
    """Writes the last tokens of a found prefix to the ring of its new sequence. It is right."""

    prefixes = PrefixTraits(finds="some")
    windows = WindowTraits(groups=2)
    max_sequences = 6
    head_counts = (1, 2)
    head_dims: ClassVar[Sequence[int]] = (4, 1)
    block_sizes: ClassVar[Sequence[int]] = (2, 4, 1, 3)

    def make(self, spec: CacheSpec) -> None:
        self.spec, self.dtype = spec, getattr(torch, spec.dtype)
        self.places = max(window or 1 for window in spec.windows)
        """Tokens of a ring."""
        self.rings = torch.zeros(
            self.max_sequences, self.places, 2, spec.num_layers, spec.num_heads, spec.head_dim,
            dtype=self.dtype, device=spec.device,
        )  # fmt: skip
        self.free_slots = list(range(self.max_sequences))
        self.stored: dict[int, SlottedSequence] = {}
        self.blocks: dict[tuple[int, ...], list[torch.Tensor]] = {}
        """Rows of each full block, by the tokens up to its end."""

    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        self.new_ids = token_ids

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for row, (seq, (token,)) in enumerate(zip(seqs, self.new_ids, strict=True)):
            if seq not in self.stored:
                self.stored[seq] = SlottedSequence(self.free_slots.pop())
            self.write(self.stored[seq], token, torch.stack([key[:, row], value[:, row]]))

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        (ids,) = self.new_ids
        found = self.match_prefix(ids)
        stored = self.stored[seq] = SlottedSequence(self.free_slots.pop())
        size = self.spec.block_size
        for end in range(size, found + 1, size):
            stored.rows += self.blocks[tuple(ids[:end])]
        stored.ids += ids[:found]
        rows = torch.stack([key, value]).movedim(2, 0)
        self.fill_ring(stored, rows[:found])
        for token, row in zip(ids[found:], rows[found:], strict=True):
            self.write(stored, token, row)

    def fill_ring(self, stored: SlottedSequence, rows: torch.Tensor) -> None:
        """Write the tokens of a found prefix to the ring of a sequence."""
        for at, row in enumerate(rows):
            self.rings[stored.slot, at % self.places] = row

    def write(self, stored: SlottedSequence, token: int, row: torch.Tensor) -> None:
        self.rings[stored.slot, len(stored.ids) % self.places] = row
        stored.ids.append(token)
        stored.rows.append(row.to(self.dtype, copy=True))
        size = self.spec.block_size
        if len(stored.ids) % size == 0:
            self.blocks.setdefault(tuple(stored.ids), stored.rows[-size:])

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        size, found = self.spec.block_size, 0
        while tuple(token_ids[: found + size]) in self.blocks and found + size <= len(token_ids):
            found += size
        return found

    def free(self, seq: int) -> None:
        self.free_slots.append(self.stored.pop(seq).slot)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        stored, window = self.stored[seq], self.spec.windows[layer]
        if window is None:
            rows = stored.rows
        else:
            live = range(max(0, len(stored.ids) - window + 1), len(stored.ids))
            rows = [self.rings[stored.slot, at % self.places] for at in live]
        empty = self.rings.new_empty(2, 0, self.spec.num_heads, self.spec.head_dim)
        both = torch.stack([row[:, layer] for row in rows], 1) if rows else empty
        return both[0], both[1]


class LeavesTheRingOfTheSlot(RingCache):
    """T23: begins after a found prefix with the ring that the last sequence of the slot left."""

    def fill_ring(self, stored: SlottedSequence, rows: torch.Tensor) -> None:
        """Do nothing."""


class TakesTheRingOfTheWriter(RingCache):
    """T23: copies the ring of a sequence with the found prefix, which has moved on since."""

    def fill_ring(self, stored: SlottedSequence, rows: torch.Tensor) -> None:
        for other in self.stored.values():
            if other is not stored and len(rows) and other.ids[: len(rows)] == stored.ids:
                self.rings[stored.slot] = self.rings[other.slot]
                return
        super().fill_ring(stored, rows)


BROKEN = (LeavesTheRingOfTheSlot, TakesTheRingOfTheWriter)
