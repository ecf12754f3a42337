"""Adapter of block managers, which keep only the books of a cache, driven as by a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import KVCacheAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

# Storage for block managers: a block manager assigns blocks, and kernels write to them. This code
# replaces the kernels.


KeysAndValues = tuple[torch.Tensor, torch.Tensor]


def read_blocks(
    arena: KeysAndValues, layer: int, table: Sequence[int | None], length: int, begin: int = 0
) -> KeysAndValues:
    """Read tokens ``begin`` to ``length`` of blocks, ``[tokens, heads, head_dim]`` each.

    Blocks whose tokens all come before ``begin`` may be None.
    """
    block_size = arena[0].shape[3]
    left_out = begin // block_size
    blocks = torch.tensor(table[left_out:], dtype=torch.int64, device=arena[0].device)
    tokens = slice(begin - left_out * block_size, length - left_out * block_size)
    keys, values = (
        stored[layer].index_select(0, blocks).transpose(1, 2).flatten(0, 1)[tokens]
        for stored in arena
    )
    return keys, values


class BlockStore:
    """Keys and values in blocks, initially zeros, written and read by block tables."""

    def __init__(self, spec: CacheSpec, num_blocks: int | None = None) -> None:
        """``num_blocks`` includes blocks that no sequence may use; None means the spec's."""
        blocks = spec.num_blocks if num_blocks is None else num_blocks
        shape = (spec.num_layers, blocks, spec.num_heads, spec.block_size, spec.head_dim)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self.block_size = spec.block_size
        self.arena: KeysAndValues = (
            torch.zeros(shape, dtype=dtype, device=spec.device),
            torch.zeros(shape, dtype=dtype, device=spec.device),
        )

    def write(
        self,
        table: Sequence[int | None],
        begin: int,
        key: torch.Tensor,
        value: torch.Tensor,
        layers: slice | Sequence[int] = slice(None),
    ) -> None:
        """Write ``[layers, tokens, heads, head_dim]`` of one sequence, from position ``begin``.

        ``layers`` selects the layers that have this table.
        """
        for at in range(key.shape[1]):
            block, slot = table[(begin + at) // self.block_size], (begin + at) % self.block_size
            for stored, new in zip(self.arena, (key, value), strict=True):
                stored[layers, block, :, slot] = new[layers, at].to(stored.dtype)

    def read(
        self, table: Sequence[int | None], layer: int, length: int, begin: int = 0
    ) -> KeysAndValues:
        """Read tokens ``begin`` to ``length`` of a sequence, ``[tokens, heads, head_dim]`` each."""
        return read_blocks(self.arena, layer, table, length, begin)

    def write_slots(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``[layers, tokens, heads, head_dim]`` to the last of a sequence's slots.

        Slots number the tokens of all blocks.
        """
        blocks, places = self._places(slots[-key.shape[1] :])
        for stored, new in zip(self.arena, (key, value), strict=True):
            stored[:, blocks, :, places] = new.transpose(0, 1).to(stored.dtype)

    def read_slots(self, slots: torch.Tensor, layer: int) -> KeysAndValues:
        """Read the tokens in these slots, ``[tokens, heads, head_dim]`` each."""
        blocks, places = self._places(slots)
        keys, values = (stored[layer, blocks, :, places] for stored in self.arena)
        return keys, values

    def table(self, slots: torch.Tensor) -> list[int]:
        """Return the block table of slots that start at the first slot of a block."""
        return [slot // self.block_size for slot in slots[:: self.block_size].tolist()]

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slots // self.block_size, slots % self.block_size


class RowRecorder(KVCacheAdapter):
    """Adapter that records the token ids and namespaces of the next write's rows."""

    row_tokens: Sequence[Sequence[int]] = ()
    """Token ids of each row."""
    row_namespaces: Sequence[int] = ()
    """Namespace of each row; empty for a cache without namespaces."""

    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        self.row_tokens = token_ids

    def record_namespaces(self, namespaces: Sequence[int]) -> None:
        self.row_namespaces = namespaces

    def namespace(self, row: int) -> int:
        return self.row_namespaces[row] if self.row_namespaces else 0


class BlockManagerAdapter(RowRecorder):
    """Base class for block managers.

    Override ``manage``, ``begin``, ``extend``, ``release`` and ``table``. Also add ``ledger``,
    ``match_prefix`` and ``use_namespaces`` if possible. Keys and values are stored here, by the
    tables. ``use_namespaces`` is ``record_namespaces`` for a manager with namespaces.
    """

    prefixes = RowRecorder.prefixes.but(shares="equal prefixes", recomputed_tokens=1)
    atomic_batches: ClassVar[bool] = False
    spare_blocks: ClassVar[int] = 0
    """Number of blocks of the manager that are not for sequences."""

    def manage(self, spec: CacheSpec) -> None:
        """Build the manager."""
        raise NotImplementedError(f"{type(self).__name__} must define manage(spec)")

    def begin(self, seq: int, token_ids: Sequence[int], namespace: int) -> int:
        """Allocate blocks for all tokens of a sequence; return how many come from prefix reuse.

        Sequences in ``preempted`` begin again. Without enough room, raise ``CacheFull`` and change
        nothing; so must ``extend``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define begin(seq, token_ids, namespace)"
        )

    def extend(self, seq: int, token: int) -> None:
        """Allocate room for one more token of a sequence."""
        raise NotImplementedError(f"{type(self).__name__} must define extend(seq, token)")

    def release(self, seq: int) -> None:
        """Free the blocks of a sequence."""
        raise NotImplementedError(f"{type(self).__name__} must define release(seq)")

    def stored(self, seq: int, tokens: int) -> None:
        """Update the manager after ``tokens`` more tokens of a sequence were stored."""

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.store = BlockStore(spec, spec.num_blocks + self.spare_blocks)
        self.window_of = list(spec.windows) or [None] * spec.num_layers
        self.stored_tokens: dict[int, tuple[list[int], int]] = {}
        """Token ids and namespace of each sequence."""
        self.preempted: set[int] = set()
        """Sequences without blocks that are to begin again."""
        self.manage(spec)

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for row, seq in enumerate(seqs):
            keys, values = key[:, row : row + 1], value[:, row : row + 1]
            if seq in self.stored_tokens:
                self.extend(seq, *self.row_tokens[row])
                token_ids, _ = self.stored_tokens[seq]
                token_ids += self.row_tokens[row]
                self._store(seq, len(token_ids) - 1, keys, values)
            else:
                self._begin(seq, list(self.row_tokens[row]), self.namespace(row), keys, values)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._begin(seq, list(self.row_tokens[0]), self.namespace(0), key, value)

    def _begin(
        self, seq: int, token_ids: list[int], namespace: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        reused: Any = self.begin(seq, token_ids, namespace)
        if not isinstance(reused, int):
            method = f"{type(self).__name__}.begin()"
            raise TypeError(
                f"{method} must return how many tokens were found, and returned {reused!r}"
            )
        self.stored_tokens[seq] = token_ids, namespace
        self._store(seq, reused, key[:, reused:], value[:, reused:])

    def _store(self, seq: int, begin: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for window in dict.fromkeys(self.window_of):
            layers = [layer for layer, each in enumerate(self.window_of) if each == window]
            self.store.write(self.table(seq, layers[0]), begin, key, value, layers)
        self.stored(seq, key.shape[1])

    def free(self, seq: int) -> None:
        del self.stored_tokens[seq]
        if seq not in self.preempted:
            self.release(seq)
        self.preempted.discard(seq)

    def preempt(self, seq: int) -> None:
        self.release(seq)
        self.preempted.add(seq)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._begin(seq, *self.stored_tokens[seq], key, value)
        self.preempted.remove(seq)

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        (token_ids, _), window = self.stored_tokens[seq], self.window_of[layer]
        live = max(0, len(token_ids) - window + 1) if window else 0
        return self.store.read(self.table(seq, layer), layer, len(token_ids), live)

    def arena(self) -> KeysAndValues:
        return self.store.arena
