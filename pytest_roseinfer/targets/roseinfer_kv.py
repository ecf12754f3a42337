"""This distribution's own block manager, in each of its arrangements."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import BadCall, CacheSpec, KVCacheAdapter, Ledger
from pytest_roseinfer.adapters.fast_path import FastPath
from pytest_roseinfer.invariants.own_conditions import OWN_CONDITIONS
from pytest_roseinfer.targets.roseinfer_bad_calls import bad_calls
from roseinfer import (
    AppendPlan,
    AppendPolicy,
    AttentionPath,
    BadArgument,
    BadBlock,
    BadRefcount,
    Condition,
    KVBlockManager,
    LayerTraits,
    OutOfBlocks,
    Path,
    load_attention_kernels,
    paged_attention_reference,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


_ALWAYS_TRITON = {"triton": True, "triton_min_batch": 1}
_TORCH = {"triton": False}
_CLONES_OFF = {"batched_copy_on_write": False}
_IDENTITY_OFF = {"identity": False}
_SCALAR_OFF = {"scalar_position": False}
_NO_SCALAR = [_IDENTITY_OFF, _SCALAR_OFF]
_SUBSETS = [_IDENTITY_OFF, {"batched_rollover": False}, _CLONES_OFF]
_moves = partial(FastPath, Path.PER_TOKEN.value)
PATHS = {
    Path.TRITON_FULL_BATCH.value: _moves(never_with=[_TORCH, *_NO_SCALAR], one_position=True),
    Path.TRITON_IDENTITY_POS.value: _moves(never_with=[_TORCH, _IDENTITY_OFF]),
    Path.TRITON_GATHER.value: _moves(runs_with=_SUBSETS, never_with=[_TORCH]),
    Path.TORCH_SCALAR.value: _moves(
        runs_with=[_TORCH], never_with=[_ALWAYS_TRITON, *_NO_SCALAR], one_position=True
    ),
    Path.TORCH_VECTOR.value: _moves(
        runs_with=[{**_TORCH, **_SCALAR_OFF}], never_with=[_ALWAYS_TRITON, _IDENTITY_OFF]
    ),
    Path.TORCH_GATHER.value: _moves(
        runs_with=[{**_TORCH, **subset} for subset in _SUBSETS], never_with=[_ALWAYS_TRITON]
    ),
    Path.CLONE_TRITON.value: _moves(never_with=[_TORCH, _CLONES_OFF]),
    Path.CLONE_TORCH.value: _moves(
        runs_with=[{**_TORCH, "batched_copy_on_write": True}],
        never_with=[{"triton": True}, _CLONES_OFF],
    ),
    AttentionPath.DECODE_TRITON.value: FastPath(
        equals=AttentionPath.REFERENCE.value, never_with=[_TORCH]
    ),
}
_COUNTED_BY_ROW = tuple(
    condition.value for condition in Condition if condition is not Condition.TRITON_UNAVAILABLE
)


class _ManagerAdapter(KVCacheAdapter):
    """Both arrangements share this: reading the storage directly, and the books."""

    full_errors = (OutOfBlocks,)
    paths = PATHS
    truncate_copies = True
    scratch_blocks = frozenset({0})
    conditions = (*_COUNTED_BY_ROW, *OWN_CONDITIONS, "list_used_again")
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "triton": (True, False),
        "identity": (True, False),
        "scalar_position": (True, False),
        "batched_copy_on_write": (True, False),
        "batched_rollover": (True, False),
        "batched": (True, False),
        "triton_min_batch": (1, 3),
        "triton_full_batch_min_batch": (None, 2),
    }
    standard_bad_calls: ClassVar[Sequence[str]] = (
        "free_unknown",
        "free_twice",
        "fork_unknown",
        "fork_freed",
        "decref_blocks_of_scratch",
        "decref_blocks_of_free_block",
        "decref_blocks_of_minus_1",
        "decref_blocks_of_other_pool",
        "decref_blocks_too_often",
        "incref_blocks_of_scratch",
        "incref_blocks_of_free_block",
        "incref_blocks_of_minus_1",
        "gather_blocks_of_scratch",
        "gather_blocks_of_free_block",
        "gather_blocks_of_minus_1",
        "gather_blocks_of_other_pool",
        "gather_blocks_past_the_end",
        "append_to_blocks_of_scratch",
        "append_to_blocks_of_free_block",
        "append_to_blocks_of_minus_1",
        "append_to_blocks_of_other_pool",
        "append_to_blocks_twice",
    )
    bad_call_errors = (BadBlock, BadRefcount, BadArgument, KeyError)
    row_conditions: ClassVar[Mapping[str, str]] = {name: name for name in _COUNTED_BY_ROW}

    def _make(self, spec: CacheSpec, layers_per_group: int) -> None:
        self.spec = spec
        self.lists: dict[int, list[list[int]]] = {}
        """The block lists of each sequence, one for each group of layers."""
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
            layers_per_group=layers_per_group,
        )
        self.first_layers = range(0, spec.num_layers, layers_per_group)

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
        return self.lists[seq][layer // self.manager.layers_per_group]

    def first_id(self, layer: int) -> int:
        """Return the id of the first block of a layer's group: ids count through all groups."""
        return layer // self.manager.layers_per_group * self.manager.max_blocks_per_layer

    def table(self, seq: int, layer: int) -> list[int]:
        return [block_id - self.first_id(layer) for block_id in self.block_ids(seq, layer)]

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        infos = [self.manager.block_info(block_id) for block_id in self.block_ids(seq, layer)]
        first_layer = layer - layer % self.manager.layers_per_group
        for at, info in enumerate(infos):
            if (info.layer, info.start) != (first_layer, at * self.spec.block_size):
                raise AssertionError(f"block {at} of the list has the record {info}")
        length = sum(info.length for info in infos)
        blocks = torch.tensor(self.table(seq, layer), dtype=torch.int64, device=self.spec.device)
        keys, values = (
            cache[layer].index_select(0, blocks).transpose(1, 2).flatten(0, 1)[:length]
            for cache in self.arena()
        )
        return keys, values

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.manager.gather_sequence(layer, self.block_ids(seq, layer))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        manager, traits = self.manager, LayerTraits(self.spec.head_dim**-0.5)
        lists = [self.block_ids(seq, layer) for seq in seqs]
        kernels = load_attention_kernels(manager.device) if manager.policy.triton else None
        if kernels is None:
            self.attended[AttentionPath.REFERENCE.value] += 1
            return paged_attention_reference(manager, layer, query, lists, [1] * len(seqs), traits)
        self.attended[AttentionPath.DECODE_TRITON.value] += 1
        lengths = [sum(manager.block_info(each).length for each in own) for own in lists]
        # Rows of the table are filled up with the scratch block.
        columns = zip_longest(*(self.table(seq, layer) for seq in seqs), fillvalue=0)
        return kernels.decode(
            query,
            manager.keys[layer],
            manager.values[layer],
            torch.tensor(list(zip(*columns, strict=True)), device=manager.device),
            torch.tensor(lengths, device=manager.device),
            traits,
        )

    def ledger(self, layer: int) -> Ledger:
        manager, first = self.manager, self.first_id(layer)
        counts = {
            block: manager.refcount(first + block)
            for block in range(1, manager.max_blocks_per_layer)
        }
        free = [block for block, count in counts.items() if not count]
        # The manager shows how many blocks are free, not which: a wrong number must not look right.
        claimed = max(0, manager.num_free_blocks(layer))
        free = [*free, *[-1] * (claimed - len(free))][:claimed]
        held = {block: count for block, count in counts.items() if count}
        return Ledger(held, free, self.spec.num_blocks)

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.manager.keys, self.manager.values

    def path_counts(self) -> Mapping[str, int]:
        counts = {**self.manager.path_counts, **self.attended}
        return {str(name): count for name, count in counts.items()}

    def ids(self, layer: int, blocks: Iterable[int]) -> list[int]:
        """Return the ids of blocks that are given as in ``table``."""
        return [self.first_id(layer) + block for block in blocks]

    def decref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        self.manager.free_blocks(layer, self.ids(layer, blocks))

    def incref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        self.manager.incref_blocks(self.ids(layer, blocks))

    def gather_blocks(self, layer: int, blocks: list[int], length: int | None) -> object:
        return self.manager.gather_sequence(layer, self.ids(layer, blocks), length)

    def bad_calls(self) -> Iterable[BadCall]:
        return bad_calls(self.manager, list(self.lists.values()))

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_padded(seqs, key, value)

    def lists_of(self, seqs: Sequence[int | None]) -> dict[int, list[list[int]]]:
        """Return the sequences' lists, empty ones for new sequences."""
        return {seq: self.lists.get(seq) or self.new_lists() for seq in seqs if seq is not None}


class PerLayerManager(_ManagerAdapter):
    """``append_token_batch`` and ``register_prefill_layer``, a block list for every layer."""

    standard_bad_calls = (
        *_ManagerAdapter.standard_bad_calls,
        "append_of_another_shape",
        "append_one_row_short",
        "append_of_integers",
    )

    def make(self, spec: CacheSpec) -> None:
        self._make(spec, layers_per_group=1)

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
        self.lists[seq] = [
            self.manager.register_prefill_layer(
                layer, key[layer].transpose(0, 1)[None], value[layer].transpose(0, 1)[None]
            )
            for layer in range(self.spec.num_layers)
        ]


class GroupedManager(_ManagerAdapter):
    """``plan_append`` once for a group of layers and ``write`` per layer.

    Four layers make two groups; fewer are one.
    """

    def make(self, spec: CacheSpec) -> None:
        self._make(spec, layers_per_group=2 if spec.num_layers == 4 else spec.num_layers)

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
        """Plan the append, which is where a bad one is refused."""
        first_layer = layer - layer % self.manager.layers_per_group
        self.manager.plan_append(first_layer, [self.ids(layer, each) for each in lists])

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
            plan = reservation[layer // self.manager.layers_per_group]
            self.manager.write(plan, layer, key[layer], value[layer])
