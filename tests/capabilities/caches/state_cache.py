"""A cache of lists, which stores states as well and keeps some of them for prefixes.

It is right.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from pytest_roseinfer import CacheFull, KVCacheAdapter, PrefixTraits, TruncationTraits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import CacheSpec

EVERY = 2
"""Tokens from one checkpoint to the next."""
MAX_CHECKPOINTS = 6


@dataclass(slots=True)
class Stored:
    """Tokens of a sequence or of a checkpoint, with their keys and values and the state."""

    ids: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    """``[2, layers, heads, head_dim]`` for each token."""
    state: torch.Tensor | None = None
    """``[layers, heads, head_dim]``, after the last token."""

    def copy(self) -> Stored:
        state = None if self.state is None else self.state.clone()
        return Stored([*self.ids], [*self.rows], state)


class StateCache(KVCacheAdapter):
    """Keeps a checkpoint of every other token of a text, and drops the one used longest ago."""

    prefixes = PrefixTraits(finds="some", granularity="token")
    truncation = TruncationTraits(errors=(ValueError,))
    fork_shares = "nothing"
    block_sizes: ClassVar[Sequence[int]] = (4, 1, 2, 3)

    def make(self, spec: CacheSpec) -> None:
        self.spec, self.dtype = spec, getattr(torch, spec.dtype)
        shape = (2, spec.num_layers, 0, spec.num_heads, spec.head_dim)
        self.nothing = torch.empty(shape, dtype=self.dtype, device=spec.device)
        self.stored: dict[int, Stored] = {}
        self.kept: OrderedDict[tuple[int, ...], Stored] = OrderedDict()

    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        self.new_ids = token_ids

    def use_states(self, states: torch.Tensor) -> None:
        self.new_states = states

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many(seqs, [1] * len(seqs), key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.require_room(seqs, counts)
        at = 0
        for seq, count, ids in zip(seqs, counts, self.new_ids, strict=True):
            for token, new in enumerate(ids):
                self.write(seq, new, key[:, at + token], value[:, at + token])
                self.update_state(seq, at, token, count)
                if self.is_kept(seq, token, count):
                    self.keep(seq)
            at += count

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def write(self, seq: int, new: int, key: torch.Tensor, value: torch.Tensor) -> None:
        stored = self.stored.setdefault(seq, Stored())
        stored.ids.append(new)
        stored.rows.append(torch.stack([key, value]).to(self.dtype))

    def update_state(self, seq: int, first: int, token: int, count: int) -> None:  # noqa: ARG002
        """Store the state after a token of a row whose first token of the write is ``first``."""
        self.stored[seq].state = self.new_states[:, first + token].clone()

    def is_kept(self, seq: int, token: int, count: int) -> bool:  # noqa: ARG002
        return len(self.stored[seq].ids) % EVERY == 0

    def keep(self, seq: int) -> None:
        """Keep a checkpoint of a sequence as it is now."""
        ids = tuple(self.stored[seq].ids)
        self.kept[ids] = self.stored[seq].copy()
        self.kept.move_to_end(ids)
        if len(self.kept) > MAX_CHECKPOINTS:
            self.kept.popitem(last=False)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.stored[seq].rows
        both = torch.stack(rows, dim=2) if rows else self.nothing
        return both[0, layer], both[1, layer]

    def peek_state(self, seq: int) -> torch.Tensor:
        state = self.stored[seq].state
        assert state is not None
        return state

    def fork(self, parent: int, child: int) -> None:
        self.require_room([child], [len(self.stored[parent].rows)])
        self.stored[child] = self.stored[parent].copy()

    def free(self, seq: int) -> None:
        self.stored.pop(seq, None)

    def preempt(self, seq: int) -> None:
        self.stored[seq] = Stored(self.stored[seq].ids)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.require_room([seq], [key.shape[1]])
        self.new_ids = [self.stored.pop(seq).ids]
        self.prefill(seq, key, value)

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:  # noqa: ARG003
        return length in (0, stored)

    def truncate(self, seq: int, length: int) -> None:
        stored = self.stored[seq]
        if length not in (0, len(stored.ids)):
            raise ValueError(f"no state after {length} tokens")
        if length == 0:
            self.stored[seq] = Stored()

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        lengths = range(len(token_ids), 0, -1)
        return next((end for end in lengths if tuple(token_ids[:end]) in self.kept), 0)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.spec.block_size)

    @property
    def num_free(self) -> int:
        """Number of blocks that sequences could still take, if they were stored in blocks."""
        held = sum(self.blocks(len(stored.rows)) for stored in self.stored.values())
        return self.spec.num_blocks - held

    def require_room(self, seqs: Sequence[int], counts: Sequence[int]) -> None:
        lengths = [len(self.stored[seq].rows) if seq in self.stored else 0 for seq in seqs]
        after = map(sum, zip(lengths, counts, strict=True))
        needed = sum(map(self.blocks, after)) - sum(map(self.blocks, lengths))
        if needed > self.num_free:
            raise CacheFull(f"{needed} blocks needed, {self.num_free} free")

    def look_up(self, token_ids: Sequence[int]) -> object:
        return tuple(token_ids[: self.match_prefix(token_ids)])

    def begin_with(self, prefix: tuple[int, ...], seq: int) -> int:
        if prefix not in self.kept or self.blocks(len(prefix)) > self.num_free:
            self.stored[seq] = Stored()
            return 0
        self.kept.move_to_end(prefix)
        self.stored[seq] = self.kept[prefix].copy()
        return len(prefix)
