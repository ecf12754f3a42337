"""This distribution's own block manager, in each of its arrangements."""

from __future__ import annotations

from collections import Counter
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
    Condition,
    KVBlockManager,
    OutOfBlocks,
    Path,
    load_attention_kernels,
    paged_attention_reference,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


_PER_TOKEN = Path.PER_TOKEN.value
_ALWAYS_TRITON = {"triton": True, "triton_min_batch": 1}
PATHS = {
    Path.TRITON_FULL_BATCH.value: FastPath(
        equals=_PER_TOKEN,
        never_with=[{"triton": False}, {"identity": False}, {"scalar_position": False}],
        one_position=True,
    ),
    Path.TRITON_IDENTITY_POS.value: FastPath(
        equals=_PER_TOKEN,
        never_with=[{"triton": False}, {"identity": False}],
    ),
    Path.TRITON_GATHER.value: FastPath(
        equals=_PER_TOKEN,
        runs_with=[
            {"identity": False},
            {"batched_rollover": False},
            {"batched_copy_on_write": False},
        ],
        never_with=[{"triton": False}],
    ),
    Path.TORCH_SCALAR.value: FastPath(
        equals=_PER_TOKEN,
        runs_with=[{"triton": False}],
        never_with=[_ALWAYS_TRITON, {"identity": False}, {"scalar_position": False}],
        one_position=True,
    ),
    Path.TORCH_VECTOR.value: FastPath(
        equals=_PER_TOKEN,
        runs_with=[{"triton": False, "scalar_position": False}],
        never_with=[_ALWAYS_TRITON, {"identity": False}],
    ),
    Path.TORCH_GATHER.value: FastPath(
        equals=_PER_TOKEN,
        runs_with=[
            {"triton": False, "identity": False},
            {"triton": False, "batched_rollover": False},
            {"triton": False, "batched_copy_on_write": False},
        ],
        never_with=[_ALWAYS_TRITON],
    ),
    Path.CLONE_TRITON.value: FastPath(
        equals=_PER_TOKEN,
        never_with=[{"triton": False}, {"batched_copy_on_write": False}],
    ),
    Path.CLONE_TORCH.value: FastPath(
        equals=_PER_TOKEN,
        runs_with=[{"triton": False, "batched_copy_on_write": True}],
        never_with=[{"triton": True}, {"batched_copy_on_write": False}],
    ),
    AttentionPath.DECODE_TRITON.value: FastPath(
        equals=AttentionPath.REFERENCE.value,
        never_with=[{"triton": False}],
    ),
}
_COUNTED_BY_ROW = tuple(
    condition.value for condition in Condition if condition is not Condition.TRITON_UNAVAILABLE
)


class _ManagerAdapter(KVCacheAdapter):
    """What the arrangements share: reading storage directly, and the books."""

    full_errors = (OutOfBlocks,)
    paths = PATHS
    scratch_blocks = frozenset({0})
    conditions = (*_COUNTED_BY_ROW, *OWN_CONDITIONS)
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
    row_conditions: ClassVar[Mapping[str, str]] = {name: name for name in _COUNTED_BY_ROW}

    manager: KVBlockManager

    def layers_per_group(self, spec: CacheSpec) -> int:
        raise NotImplementedError

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.lists: dict[int, list[list[int]]] = {}
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
        )
        self.groups = spec.num_layers // self.manager.layers_per_group

    def set_options(self, options: Mapping[str, Any]) -> None:
        self.manager.policy = AppendPolicy(**options)

    def fork(self, parent: int, child: int) -> None:
        lists = [list(block_ids) for block_ids in self.lists[parent]]
        for block_ids in lists:
            self.manager.incref_blocks(block_ids)
        self.lists[child] = lists

    def free(self, seq: int) -> None:
        for group, block_ids in enumerate(self.lists.pop(seq)):
            self.manager.free_blocks(group * self.manager.layers_per_group, block_ids)

    def table(self, seq: int, layer: int) -> list[int]:
        group = layer // self.manager.layers_per_group
        first = group * self.manager.max_blocks_per_layer
        return [block_id - first for block_id in self.lists[seq][group]]

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self.table(seq, layer)
        per_group = self.manager.layers_per_group
        first = layer // per_group * self.manager.max_blocks_per_layer
        infos = [self.manager.block_info(first + block) for block in blocks]
        for at, info in enumerate(infos):
            if (info.layer, info.start) != (layer - layer % per_group, at * self.spec.block_size):
                raise AssertionError(f"block {at} of the list has the record {info}")
        length = sum(info.length for info in infos)
        named = torch.tensor(blocks, dtype=torch.int64, device=self.manager.device)
        keys, values = (
            cache[layer].index_select(0, named).transpose(1, 2).flatten(0, 1)[:length]
            for cache in (self.manager.keys, self.manager.values)
        )
        return keys, values

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        group = layer // self.manager.layers_per_group
        keys, values = self.manager.gather_sequence(layer, self.lists[seq][group])
        return keys.transpose(0, 1), values.transpose(0, 1)

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        manager, scale = self.manager, self.spec.head_dim**-0.5
        kernels = load_attention_kernels(manager.device) if manager.policy.triton else None
        if kernels is None:
            self.attended[AttentionPath.REFERENCE.value] += 1
            lists = [self.lists[seq][layer // manager.layers_per_group] for seq in seqs]
            return paged_attention_reference(manager, layer, query, lists, [1] * len(seqs), scale)
        self.attended[AttentionPath.DECODE_TRITON.value] += 1
        tables = [self.table(seq, layer) for seq in seqs]
        lengths = [self._length(seq, layer) for seq in seqs]
        width = max(map(len, tables))
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        return kernels.decode(
            query,
            manager.keys[layer],
            manager.values[layer],
            torch.tensor(padded, device=manager.device),
            torch.tensor(lengths, device=manager.device),
            scale,
        )

    def _length(self, seq: int, layer: int) -> int:
        """How many tokens the manager's books say a sequence has."""
        block_ids = self.lists[seq][layer // self.manager.layers_per_group]
        return sum(self.manager.block_info(block_id).length for block_id in block_ids)

    def ledger(self, layer: int) -> Ledger:
        manager = self.manager
        first = layer // manager.layers_per_group * manager.max_blocks_per_layer
        counts = {
            block: manager.refcount(first + block)
            for block in range(1, manager.max_blocks_per_layer)
        }
        free = [block for block, count in counts.items() if not count]
        claimed = manager.num_free_blocks(layer)
        # The manager shows a number, not a list: a wrong one must not look right.
        free += [-1] * max(0, claimed - len(free))
        return Ledger(
            {block: count for block, count in counts.items() if count},
            free[: max(claimed, 0)],
            self.spec.num_blocks,
        )

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.manager.keys, self.manager.values

    def path_counts(self) -> Mapping[str, int]:
        counts = {**self.manager.path_counts, **self.attended}
        return {str(name): count for name, count in counts.items()}

    def bad_calls(self) -> Iterable[BadCall]:
        return bad_calls(self.manager, list(self.lists.values()))

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_padded(seqs, key, value)

    def _with_fresh(self, seqs: Sequence[int | None]) -> dict[int, list[list[int]]]:
        """The sequences' lists, with new ones for names not seen before."""
        return {
            seq: self.lists.get(seq) or [[] for _ in range(self.groups)]
            for seq in seqs
            if seq is not None
        }


class PerLayerManager(_ManagerAdapter):
    """``append_token_batch`` and ``register_prefill_layer``, a block list for every layer."""

    def layers_per_group(self, spec: CacheSpec) -> int:  # noqa: ARG002  (the other arrangement asks)
        return 1

    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        lists = self._with_fresh(seqs)
        for layer in range(self.spec.num_layers):
            rows = [None if seq is None else lists[seq][layer] for seq in seqs]
            self.manager.append_token_batch(layer, rows, key[layer], value[layer])
        self.lists.update(lists)

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

    def layers_per_group(self, spec: CacheSpec) -> int:
        return 2 if spec.num_layers == 4 else spec.num_layers

    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.fill(self._plan(seqs, None), key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.fill(self._plan(seqs, counts), key, value)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.fill(self._plan([seq], [key.shape[1]]), key, value)

    def reserve(self, seqs: Sequence[int], counts: Sequence[int]) -> list[AppendPlan]:
        return self._plan(seqs, counts)

    def fill(self, reservation: list[AppendPlan], key: torch.Tensor, value: torch.Tensor) -> None:
        for layer in range(self.spec.num_layers):
            plan = reservation[layer // self.manager.layers_per_group]
            self.manager.write(plan, layer, key[layer], value[layer])

    def _plan(self, seqs: Sequence[int | None], counts: Sequence[int] | None) -> list[AppendPlan]:
        lists = self._with_fresh(seqs)
        plans = []
        for group in range(self.groups):
            rows = [None if seq is None else lists[seq][group] for seq in seqs]
            first = group * self.manager.layers_per_group
            plans.append(self.manager.plan_append(first, rows, counts))
        self.lists.update(lists)
        return plans
