"""This distribution's Triton kernels alone, on caches with memory layouts of other engines.

The block manager always passes one contiguous cache to its kernels; callers of the checked wrappers
may pass others. Here the kernels move the data of a cache with block tables in plain Python, whose
keys and values have layouts that differ between histories, and from each other.
"""

from __future__ import annotations

import importlib
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import BadCall, CacheFull, CacheSpec, FastPath, Ledger
from roseinfer import BadArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_append = importlib.import_module("roseinfer.kernels.triton." + "append")
_clone = importlib.import_module("roseinfer.kernels.triton." + "clone")

LAYOUTS = ("plain", "pairs", "tokens_first", "gaps", "slow_dims")
_GUARD = 7.0
"""Value of the gaps in a layout, which no write may change."""

_Pair = tuple[torch.Tensor, torch.Tensor]


def lay_out_cache(layout: str, spec: CacheSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache's memory, and its ``[layers, blocks, heads, tokens, head_dim]`` view."""
    layers, blocks, heads = spec.num_layers, spec.num_blocks, spec.num_heads
    tokens, dims = spec.block_size, spec.head_dim
    like = {"dtype": getattr(torch, spec.dtype), "device": spec.device}
    if layout == "pairs":  # the other half of every block is not the cache's
        memory = torch.full((layers, blocks, 2, heads, tokens, dims), _GUARD, **like)
        return memory, memory[:, :, 1]
    if layout == "tokens_first":  # the heads of a token are adjacent
        memory = torch.full((layers, blocks, tokens, heads, dims), _GUARD, **like)
        return memory, memory.transpose(2, 3)
    if layout == "gaps":  # gaps after every token and block
        memory = torch.full((layers, blocks + 1, heads, tokens, dims + 3), _GUARD, **like)
        return memory, memory[:, 1:, ..., :dims]
    if layout == "slow_dims":  # a last dimension with a large stride
        memory = torch.full((layers, blocks, heads, dims, tokens), _GUARD, **like)
        return memory, memory.transpose(3, 4)
    memory = torch.full((layers, blocks, heads, tokens, dims), _GUARD, **like)
    return memory, memory


class _Kernels(KVCacheAdapter):
    """Common part of both caches: memory, block tables and calls."""

    fast_interpreter = True

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "keys": LAYOUTS,
        "values": (LAYOUTS[1:] + LAYOUTS[:1]),
        "index": ("int64", "int32"),
        "gather": (False, True),
    }

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.holders: Counter[int] = Counter()
        self.free_blocks = list(range(spec.num_blocks))[::-1]
        self.counts: Counter[str] = Counter()
        self.memory: list[torch.Tensor] = []
        views = []
        for name in ("keys", "values"):
            memory, view = lay_out_cache(spec.options[name], spec)
            self.memory.append(memory)
            views.append(view)
        self.caches = (views[0], views[1])

    # ------------------------------------------------------------------------- the writes

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        slots, copies = self._make_room(seqs)
        if copies:
            self._clone(copies)
        positions = {position for _, position in slots}
        if self.spec.options["gather"]:
            name = "triton_gather"
        else:
            name = "triton_full_batch" if len(positions) == 1 else "triton_identity_pos"
        self.counts[name] += 1
        for layer in range(self.spec.num_layers):
            self._write(name, slots, layer, (key[layer], value[layer]))

    def _write(self, name: str, slots: list[tuple[int, int]], layer: int, new: _Pair) -> None:
        arguments: dict[str, Any] = {
            "k_cache_layer": self.caches[0][layer],
            "v_cache_layer": self.caches[1][layer],
            "key_new": new[0],
            "value_new": new[1],
        }
        if name == "triton_full_batch":
            blocks = self._index([block for block, _ in slots])
            _append.kv_append_triton_full_batch(**arguments, block_idx=blocks, pos=slots[0][1])
            return
        rows = list(range(len(slots)))
        if name == "triton_gather":  # in another order, which must not matter
            rows = rows[1::2] + rows[::2]
        arguments["block_idx"] = self._index([slots[row][0] for row in rows])
        arguments["pos"] = self._index([slots[row][1] for row in rows])
        if name == "triton_gather":
            _append.kv_append_triton(**arguments, batch_idx=self._index(rows))
        else:
            _append.kv_append_triton_identity_pos(**arguments)

    def _clone(self, copies: list[tuple[int, int]]) -> None:
        self.counts["clone_triton"] += 1
        source, target = zip(*copies, strict=True)
        _clone.kv_clone_triton(
            k_cache=self.caches[0],
            v_cache=self.caches[1],
            source=self._index(source),
            target=self._index(target),
        )

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        dtype = getattr(torch, self.spec.options["index"])
        return torch.tensor(numbers, dtype=dtype, device=self.spec.device)

    # ---------------------------------------------------------------------- block tables

    def _make_room(self, seqs: Sequence[int]) -> tuple[list[tuple[int, int]], list[_Move]]:
        """Return a slot for each sequence's next token, and the blocks to copy first."""
        before = self.free_blocks.copy(), self.holders.copy()
        tables = {seq: list(self.tables.get(seq, ())) for seq in seqs}
        copies = []
        slots = []
        try:
            for seq in seqs:
                table, position = tables[seq], self.lengths.get(seq, 0) % self.spec.block_size
                if not position:
                    table.append(self._take())
                elif self.holders[table[-1]] > 1:
                    old, table[-1] = table[-1], self._take()
                    self.holders[old] -= 1
                    copies.append((old, table[-1]))
                slots.append((table[-1], position))
        except CacheFull:
            self.free_blocks, self.holders = before
            raise
        self.tables.update(tables)
        self.lengths.update({seq: self.lengths.get(seq, 0) + 1 for seq in seqs})
        return slots, copies

    def _take(self) -> int:
        if not self.free_blocks:
            raise CacheFull("no block is free")
        block = self.free_blocks.pop()
        self.holders[block] = 1
        return block

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = list(self.tables[parent])
        self.lengths[child] = self.lengths[parent]
        self.holders.update(self.tables[child])

    def free(self, seq: int) -> None:
        del self.lengths[seq]
        for block in self.tables.pop(seq):
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                self.free_blocks.append(block)

    def peek(self, seq: int, layer: int) -> _Pair:
        for memory, view in zip(self.memory, self.caches, strict=True):
            _check_gaps(memory, view)
        keys, values = (
            cache[layer, self.tables[seq]].transpose(1, 2).flatten(0, 1)[: self.lengths[seq]]
            for cache in self.caches
        )
        return keys, values


_Move = tuple[int, int]


def _check_gaps(memory: torch.Tensor, view: torch.Tensor) -> None:
    if memory.numel() == view.numel():
        return
    outside = torch.ones_like(memory, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    wrong = outside & (memory != _GUARD)
    if wrong.any():
        raise AssertionError(f"memory outside the cache was written, at {wrong.nonzero()[0]}")


class StridedKernels(_Kernels):
    """The append kernels and the clone kernel, on keys and values of any layout."""

    paths: ClassVar[Mapping[str, FastPath]] = {
        "triton_full_batch": FastPath(equals="per_token", one_position=True),
        "triton_identity_pos": FastPath(equals="per_token"),
        "triton_gather": FastPath(equals="per_token", runs_with=[{"gather": True}]),
        "clone_triton": FastPath(equals="per_token"),
    }

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  (one for all layers)
        return self.tables[seq]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        return Ledger(dict(self.holders), self.free_blocks, self.spec.num_blocks)

    def arena(self) -> _Pair:
        return self.caches

    def path_counts(self) -> Mapping[str, int]:
        return self.counts

    def bad_calls(self) -> Iterator[BadCall]:
        """Yield calls with a wrong index in the last row only, or a tensor that does not fit."""
        spec = self.spec
        right: dict[str, Any] = {
            "k_cache_layer": self.caches[0][0],
            "v_cache_layer": self.caches[1][0],
            "key_new": torch.ones(2, spec.num_heads, spec.head_dim, device=spec.device),
            "value_new": torch.ones(2, spec.num_heads, spec.head_dim, device=spec.device),
            "batch_idx": self._index([0, 1]),
            "block_idx": self._index([0, 1]),
            "pos": self._index([0, 0]),
        }
        wrong = {
            "batch_idx": self._index([0, 2]),
            "block_idx": self._index([0, spec.num_blocks]),
            "pos": self._index([0, spec.block_size]),
            "value_new": right["value_new"][:1],
        }
        for name, value in wrong.items():
            yield BadCall(
                f"kv_append_triton with a wrong {name}",
                lambda arguments={**right, name: value}: _append.kv_append_triton(**arguments),  # type: ignore[misc]
                (BadArgument,),
            )
        yield BadCall(
            "kv_clone_triton to one target twice",
            lambda: _clone.kv_clone_triton(
                k_cache=self.caches[0],
                v_cache=self.caches[1],
                source=self._index([0, 1]),
                target=self._index([1, 1]),
            ),
            (BadArgument,),
        )


class CompactedKernels(_Kernels):
    """The same, compacted after every free: most blocks are source and target of a copy."""

    def free(self, seq: int) -> None:
        super().free(seq)
        used = sorted(self.holders)
        new_ids = {old: new for new, old in enumerate(used)}
        # Last block first: copied one by one instead of at once, all but one would be lost.
        copies = [(old, new) for old, new in new_ids.items() if old != new][::-1]
        if not copies:
            return
        self._clone(copies)
        self.holders = Counter({new_ids[old]: count for old, count in self.holders.items()})
        self.tables = {seq: [new_ids[old] for old in table] for seq, table in self.tables.items()}
        self.free_blocks = list(range(len(used), self.spec.num_blocks))[::-1]
