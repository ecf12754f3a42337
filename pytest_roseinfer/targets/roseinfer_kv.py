"""Adapters of roseinfer's block manager: per layer, grouped, and with windows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import FastPath
from pytest_roseinfer.targets.block_manager import read_blocks
from pytest_roseinfer.targets.roseinfer_manager import PATHS, MisusedManager, ReadManager
from roseinfer import AttentionPath, BadArgument, Condition, Path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from pytest_roseinfer.targets.block_manager import KeysAndValues
    from roseinfer import AppendPlan


_WRITES = frozenset(Path) - {Path.PER_TOKEN, Path.CLONE_TRITON, Path.CLONE_TORCH}
_BATCHED = {"batched": True}
_BATCH_SWITCHES = ("batched", "batched_rollover", "batched_copy_on_write")
_PREFILL = "prefill"


def _for_batches(path: FastPath) -> FastPath:
    """Return a path that only appends with the switch ``batched`` take."""
    return replace(
        path,
        runs_with=[{**each, **_BATCHED} for each in path.runs_with or [{}]],
        aims=[{**each, **_BATCHED} for each in path.settings_to_draw or [{}]],
    )


class PerLayerManager(MisusedManager):
    """Adapter with block lists per layer: ``append_token_batch``, ``register_prefill_layer``.

    The writes of prompts are one path, since no switch turns them off. ``per_token``, the slow
    path, runs only if a switch of batches is off.
    """

    paths: ClassVar[Mapping[str, FastPath]] = {
        **{
            name: _for_batches(path) if name in _WRITES else path
            for name, path in MisusedManager.paths.items()
        },
        _PREFILL: FastPath(Path.PER_TOKEN.value),
        Path.PER_TOKEN.value: FastPath(
            Path.PER_TOKEN.value, [{name: False} for name in _BATCH_SWITCHES], share=0.5
        ),
    }
    standard_bad_calls = (
        *MisusedManager.standard_bad_calls,
        "append_of_another_shape",
        "append_one_row_short",
        "append_of_integers",
    )

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.prefills: Counter[str] = Counter()
        """Writes of prompts, by path."""

    def layers_per_group(self, spec: CacheSpec) -> int:  # noqa: ARG002
        return 1

    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        lists = self.lists_of(seqs)
        for layer in range(self.spec.num_layers):
            rows = [None if seq is None else lists[seq][layer] for seq in seqs]
            self.manager.append_token_batch(layer, rows, key[layer], value[layer])
        self.lists.update(lists)

    def append_to_blocks(
        self, layer: int, lists: list[list[int]], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        rows = [self.ids(layer, blocks) for blocks in lists]
        self.manager.append_token_batch(layer, rows, key[layer], value[layer])

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        before = self._write_counts()
        self.lists[seq] = [
            self.manager.register_prefill_layer(
                layer, key[layer].transpose(0, 1)[None], value[layer].transpose(0, 1)[None]
            )
            for layer in range(self.spec.num_layers)
        ]
        self.prefills += self._write_counts() - before

    def _write_counts(self) -> Counter[str]:
        return Counter({path: self.manager.path_counts[path] for path in _WRITES})

    def path_counts(self) -> Mapping[str, int]:
        counts = Counter(super().path_counts())
        counts.subtract(self.prefills)
        return {**counts, _PREFILL: self.prefills.total()}


class GroupedManager(MisusedManager):
    """Adapter with groups of layers: ``plan_append`` per group and ``write`` per layer.

    Four layers make two groups; fewer make one.
    """

    def layers_per_group(self, spec: CacheSpec) -> int:
        return 2 if spec.num_layers == 4 else spec.num_layers

    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.fill(self.reserve(seqs, None), key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.fill(self.reserve(seqs, counts), key, value)

    def append_to_blocks(
        self,
        layer: int,
        lists: list[list[int]],
        key: torch.Tensor,  # noqa: ARG002
        value: torch.Tensor,  # noqa: ARG002
    ) -> None:
        """Plan the append, which refuses bad block lists."""
        self.manager.plan_append(layer, [self.ids(layer, each) for each in lists])

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def reserve(self, seqs: Sequence[int | None], counts: Sequence[int] | None) -> list[AppendPlan]:
        lists = self.lists_of(seqs)
        plans = []
        for group, first_layer in enumerate(self.first_layers):
            rows = [None if seq is None else lists[seq][group] for seq in seqs]
            plans.append(self.manager.plan_append(first_layer, rows, counts))
        self.lists.update(lists)
        return plans

    def fill(self, reservation: list[AppendPlan], key: torch.Tensor, value: torch.Tensor) -> None:
        for layer in range(self.spec.num_layers):
            plan = reservation[self.manager.group_of(layer)]
            self.manager.write(plan, layer, key[layer], value[layer])


# Windows: the layers of one window share block lists.


def _first_live(window: int | None, length: int) -> int:
    return max(0, length - window + 1) if window else 0


class WindowedManager(ReadManager):
    """Adapter with windows, which share a pool; blocks that leave a window are freed at once."""

    windows = ReadManager.windows.but(groups=3, pools="shared")
    conditions = tuple(name for name in ReadManager.conditions if name != Condition.PADDING.value)
    row_conditions: ClassVar[Mapping[str, str]] = {}
    truncation = ReadManager.truncation.but(errors=(BadArgument,))
    # The layers of different windows share memory, so these views of all layers do not exist.
    arena: Any = KVCacheAdapter.arena
    attend: Any = KVCacheAdapter.attend
    gather_first: Any = KVCacheAdapter.gather_first
    append: Any = KVCacheAdapter.append
    append_padded: Any = KVCacheAdapter.append_padded
    paths: ClassVar[Mapping[str, FastPath]] = {
        name: path for name, path in PATHS.items() if name not in {*AttentionPath}
    }

    def make(self, spec: CacheSpec) -> None:
        self.lengths: Counter[int] = Counter()
        super().make(spec)

    def layers_per_group(self, spec: CacheSpec) -> int:
        """Return the largest number of layers of one window, so that each window is one group."""
        return max(Counter(spec.windows).values())

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        lists = self.lists_of(seqs)
        plans = self.manager.plan_groups([lists[seq] for seq in seqs], counts)
        self.lists.update(lists)
        for layer in range(self.spec.num_layers):
            plan = plans[self.manager.group_of(layer)]
            self.manager.write(plan, layer, key[layer], value[layer])
        for seq, count in zip(seqs, counts, strict=True):
            self.lengths[seq] += count
            self.slide(seq)

    def fork(self, parent: int, child: int) -> None:
        self.lists[child] = self.new_lists()
        for block_ids, shared in zip(self.lists[child], self.lists[parent], strict=True):
            block_ids += shared
            self.manager.incref_blocks([each for each in shared if each not in self.scratch_blocks])
        self.lengths[child] = self.lengths[parent]

    def free(self, seq: int) -> None:
        super().free(seq)
        del self.lengths[seq]

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:
        """Return True if no block that the next token sees may have been given back."""
        return not length or all(
            _first_live(window, length) // spec.block_size
            == _first_live(window, stored) // spec.block_size
            for window in spec.windows
        )

    def truncate(self, seq: int, length: int) -> None:
        self.truncate_many([seq], [length])

    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        self.manager.truncate_groups([self.lists[seq] for seq in seqs], lengths)
        for seq, length in zip(seqs, lengths, strict=True):
            self.lengths[seq] = length

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        return [block_id or None for block_id in self.block_ids(seq, layer)]

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        self.records(seq, layer)
        keys, values = self.manager.caches(layer)
        length = self.lengths[seq]
        first = _first_live(self.spec.windows[layer], length)
        return read_blocks((keys[None], values[None]), 0, self.table(seq, layer), length, first)

    def gather(self, seq: int, layer: int) -> KeysAndValues:
        length = self.lengths[seq]
        live = length - _first_live(self.spec.windows[layer], length)
        keys, values = super().gather(seq, layer)
        return keys[len(keys) - live :], values[len(values) - live :]

    def slide(self, seq: int) -> None:
        for first_layer, block_ids in zip(self.first_layers, self.lists[seq], strict=True):
            self.manager.free_out_of_window(first_layer, block_ids, self.lengths[seq])
