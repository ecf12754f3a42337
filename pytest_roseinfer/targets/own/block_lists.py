"""Drives this distribution's block manager, whose callers keep the block lists of sequences."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter
from pytest_roseinfer.adapters.names.condition_names import OWN_CONDITIONS
from pytest_roseinfer.targets.own.manager_switches import OPTION_CHOICES, PATHS
from roseinfer import AppendPolicy, Condition, KVBlockManager, OutOfBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_roseinfer.adapters.fast_path import FastPath

_COUNTED_BY_ROW = tuple(
    condition.value for condition in Condition if condition is not Condition.TRITON_UNAVAILABLE
)


class BlockLists(KVCacheAdapter):
    """A sequence has a block list for each group of layers; how it is written is left open."""

    full_errors = (OutOfBlocks,)
    paths: ClassVar[Mapping[str, FastPath]] = PATHS
    truncate_copies = True
    scratch_blocks = frozenset({0})
    conditions = (*_COUNTED_BY_ROW, *OWN_CONDITIONS, "list_used_again")
    option_choices = OPTION_CHOICES
    row_conditions: ClassVar[Mapping[str, str]] = {name: name for name in _COUNTED_BY_ROW}

    def layers_per_group(self, spec: CacheSpec) -> int:
        """Return how many layers have one list."""
        raise NotImplementedError

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.lists: dict[int, list[list[int]]] = {}
        self.spare: list[list[list[int]]] = []
        """Lists of sequences that were freed, emptied, for the next ones."""
        self.attended: Counter[str] = Counter()
        self.manager = KVBlockManager(
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            block_size=spec.block_size,
            max_blocks_per_layer=spec.num_blocks + 1,
            device=spec.device,
            dtype=getattr(torch, spec.dtype),
            policy=AppendPolicy(**spec.options),
            layers_per_group=self.layers_per_group(spec),
            windows=spec.windows or None,
        )
        self.first_layers = [group.layers[0] for group in self.manager.groups]

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_padded(seqs, key, value)

    def set_options(self, options: Mapping[str, Any]) -> None:
        self.manager.policy = AppendPolicy(**options)

    def fork(self, parent: int, child: int) -> None:
        self.lists[child] = self.new_lists()
        for block_ids, shared in zip(self.lists[child], self.lists[parent], strict=True):
            block_ids += shared
            self.manager.incref_blocks(block_ids)

    def truncate(self, seq: int, length: int) -> None:
        for first_layer, block_ids in zip(self.first_layers, self.lists[seq], strict=True):
            self.manager.truncate(first_layer, block_ids, length)

    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        for group, first_layer in enumerate(self.first_layers):
            lists = [self.lists[seq][group] for seq in seqs]
            self.manager.truncate_batch(first_layer, lists, lengths)

    def free(self, seq: int) -> None:
        lists = self.lists.pop(seq)
        for first_layer, block_ids in zip(self.first_layers, lists, strict=True):
            self.manager.free_blocks(first_layer, block_ids)
            block_ids.clear()
        self.spare.append(lists)

    def new_lists(self) -> list[list[int]]:
        return self.spare.pop() if self.spare else [[] for _ in self.first_layers]

    def kept_in(self, seq: int) -> list[list[int]]:
        return self.lists[seq]

    def block_ids(self, seq: int, layer: int) -> list[int]:
        return self.lists[seq][self.manager.group_of(layer)]

    def first_id(self, layer: int) -> int:
        """Return the id of the first block of a layer's pool: ids count through all pools."""
        return self.manager.first_id(layer)

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        return [block_id - self.first_id(layer) for block_id in self.block_ids(seq, layer)]

    def ids(self, layer: int, blocks: Iterable[int]) -> list[int]:
        """Return the ids of blocks that are given as in ``table``."""
        return [self.first_id(layer) + block for block in blocks]

    def lists_of(self, seqs: Sequence[int | None]) -> dict[int, list[list[int]]]:
        """Return the sequences' lists, empty ones for new sequences."""
        return {seq: self.lists.get(seq) or self.new_lists() for seq in seqs if seq is not None}

    def path_counts(self) -> Mapping[str, int]:
        counts = {**self.manager.path_counts, **self.attended}
        return {str(name): count for name, count in counts.items()}
