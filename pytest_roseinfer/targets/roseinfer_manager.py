"""Base classes of adapters of roseinfer's block manager: lists, switches, reads, bad calls."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import (
    HARNESS_CONDITIONS,
    BadCall,
    CacheSpec,
    FastPath,
    Ledger,
)
from pytest_roseinfer.capabilities.truncation import TruncationTraits
from pytest_roseinfer.targets.block_manager import read_blocks
from roseinfer import (
    AppendPolicy,
    AttentionPath,
    BadArgument,
    BadBlock,
    BadRefcount,
    Condition,
    KVBlockManager,
    OutOfBlocks,
    Path,
    StalePlan,
)
from roseinfer._plugin import LayerTraits, load_attention_kernels, paged_attention_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_roseinfer.targets.block_manager import KeysAndValues
    from roseinfer import KVBlockInfo

# Switches, and those that each fast path needs.


OPTION_CHOICES: Mapping[str, Sequence[Any]] = {
    "triton": (True, False),
    "identity": (True, False),
    "scalar_position": (True, False),
    "batched_copy_on_write": (True, False),
    "batched_rollover": (True, False),
    "batched": (True, False),
    "triton_min_batch": (1, 3),
    "triton_full_batch_min_batch": (None, 2),
}
_LARGE_TRITON = {"triton_min_batch": 3}
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
        runs_with=[_TORCH, _LARGE_TRITON], never_with=_NO_SCALAR, one_position=True, aims=[_TORCH]
    ),
    Path.TORCH_VECTOR.value: _moves(
        runs_with=[_TORCH, _LARGE_TRITON],
        never_with=[_IDENTITY_OFF],
        aims=[{**_TORCH, **_SCALAR_OFF}],
    ),
    Path.TORCH_GATHER.value: _moves(
        runs_with=[{**each, **subset} for each in (_TORCH, _LARGE_TRITON) for subset in _SUBSETS],
        aims=[{**_TORCH, **subset} for subset in _SUBSETS],
    ),
    Path.CLONE_TRITON.value: _moves(never_with=[_TORCH, _CLONES_OFF]),
    Path.CLONE_TORCH.value: _moves(runs_with=[{**_TORCH, "batched_copy_on_write": True}]),
    AttentionPath.DECODE_TRITON.value: FastPath(
        equals=AttentionPath.REFERENCE.value, never_with=[_TORCH]
    ),
}


_COUNTED_BY_ROW = tuple(
    condition.value for condition in Condition if condition is not Condition.TRITON_UNAVAILABLE
)


class BlockLists(KVCacheAdapter):
    """Base adapter with block lists of sequences, one per layer group; subclasses write to them."""

    full_errors = (OutOfBlocks,)
    fast_interpreter = True
    paths: ClassVar[Mapping[str, FastPath]] = PATHS
    truncation = TruncationTraits(copies=True)
    scratch_blocks = frozenset({0})
    conditions = (*_COUNTED_BY_ROW, *HARNESS_CONDITIONS, "list_used_again")
    option_choices = OPTION_CHOICES
    row_conditions: ClassVar[Mapping[str, str]] = {name: name for name in _COUNTED_BY_ROW}

    def layers_per_group(self, spec: CacheSpec) -> int:
        """Return the number of layers that share a list."""
        raise NotImplementedError

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.lists: dict[int, list[list[int]]] = {}
        self.spare: list[list[list[int]]] = []
        """Emptied lists of freed sequences, for reuse by new ones."""
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

    def container(self, seq: int) -> list[list[int]]:
        return self.lists[seq]

    def block_ids(self, seq: int, layer: int) -> list[int]:
        return self.lists[seq][self.manager.group_of(layer)]

    def first_id(self, layer: int) -> int:
        """Return the id of the first block of a layer's pool; ids are unique across pools."""
        return self.manager.first_id(layer)

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        return [block_id - self.first_id(layer) for block_id in self.block_ids(seq, layer)]

    def ids(self, layer: int, blocks: Iterable[int]) -> list[int]:
        """Return the ids of blocks that are numbered as in ``table``."""
        return [self.first_id(layer) + block for block in blocks]

    def lists_of(self, seqs: Sequence[int | None]) -> dict[int, list[list[int]]]:
        """Return the lists of sequences, empty ones for new sequences."""
        return {seq: self.lists.get(seq) or self.new_lists() for seq in seqs if seq is not None}

    def path_counts(self) -> Mapping[str, int]:
        counts = {**self.manager.path_counts, **self.attended}
        return {str(name): count for name, count in counts.items()}


# Reading back, in three ways, and the books.


class ReadManager(BlockLists):
    """Adapter that reads sequences from the storage, by the manager's gather, and by attention."""

    def arena(self) -> KeysAndValues:
        return self.manager.keys, self.manager.values

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        length = sum(info.length for info in self.records(seq, layer))
        return read_blocks(self.arena(), layer, self.table(seq, layer), length)

    def records(self, seq: int, layer: int) -> list[KVBlockInfo]:
        """Return the records of the blocks that a sequence holds in a layer; raise if one is wrong.

        Blocks that left the window have no record.
        """
        manager = self.manager
        infos: list[KVBlockInfo] = []
        group = manager.groups[manager.group_of(layer)]
        first_layer = 0 if manager.one_pool else group.layers[0]
        for at, block_id in enumerate(self.block_ids(seq, layer)):
            if manager.one_pool and block_id in self.scratch_blocks:
                continue
            info = manager.block_info(block_id)
            if (info.layer, info.start) != (first_layer, at * self.spec.block_size):
                raise AssertionError(f"block {at} of the list has the record {info}")
            infos.append(info)
        return infos

    def gather(self, seq: int, layer: int) -> KeysAndValues:
        keys, values = self.manager.gather_sequence(layer, self.block_ids(seq, layer))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def gather_first(self, seq: int, layer: int, length: int) -> KeysAndValues:
        keys, values = self.manager.gather_sequence(layer, self.block_ids(seq, layer), length)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        manager, traits = self.manager, LayerTraits(self.spec.head_dim**-0.5)
        lists = [self.block_ids(seq, layer) for seq in seqs]
        kernels = load_attention_kernels(manager.device) if manager.policy.triton else None
        if kernels is None:
            self.attended[AttentionPath.REFERENCE.value] += 1
            return paged_attention_reference(manager, layer, query, lists, [1] * len(seqs), traits)
        self.attended[AttentionPath.DECODE_TRITON.value] += 1
        lengths = [sum(manager.block_info(each).length for each in ids) for ids in lists]
        # Table rows are padded with the scratch block.
        columns = zip_longest(*(self.table(seq, layer) for seq in seqs), fillvalue=0)
        return kernels.decode(
            query,
            *manager.caches(layer),
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
        refcounts = {block: count for block, count in counts.items() if count}
        # The manager shows the number of free blocks, not which are free.
        free = [block for block, count in counts.items() if not count]
        num_free = manager.num_free_blocks(layer)
        return Ledger(refcounts, free, self.spec.num_blocks, num_free=num_free)


# Bad calls in the manager's current state, in addition to the standard ones.


_MORE_PLANS = 64
"""Number of later plans that make a plan stale."""


def bad_calls(
    manager: KVBlockManager, sequences: Sequence[Sequence[list[int]]]
) -> Iterator[BadCall]:
    """Yield calls that misuse the last block list of the last group that has one.

    ``sequences`` hold a block list per group. A manager that checks only its first group, or only
    the first row of a call, does not refuse these.
    """
    for group in reversed(range(manager.num_layers // manager.layers_per_group)):
        if lists := [each[group] for each in sequences if each[group]]:
            layer, block_ids = group * manager.layers_per_group, lists[-1]
            yield _shared_and_given_back(manager, layer, block_ids)
            yield from _plans(manager, layer, block_ids)
            if manager.layers_per_group == 1:
                yield from _one_token(manager, layer)
                yield from _appends(manager, layer, lists)
            return


def _refused(
    words: str,
    errors: type[Exception] | tuple[type[Exception], ...],
    call: Callable[..., object],
    *arguments: object,
) -> BadCall:
    errors = errors if isinstance(errors, tuple) else (errors,)
    return BadCall(words, partial(call, *arguments), errors)


def _one_token(manager: KVBlockManager, layer: int) -> Iterator[BadCall]:
    """Append a single token to blocks that the standard bad calls use in batches."""
    size = manager.max_blocks_per_layer
    first = layer // manager.layers_per_group * size
    wrong = {"the scratch block": first, "a block of the next layer": first + size + 1}
    if unused := [block for block in range(first + 1, first + size) if not manager.refcount(block)]:
        wrong["a free block"] = unused[0]
    new = _tokens(manager, 1)[0]
    for description, block in wrong.items():
        words = f"append_token to {description}"
        yield _refused(words, BadBlock, manager.append_token, layer, [block], new, new)


def _shared_and_given_back(manager: KVBlockManager, layer: int, block_ids: list[int]) -> BadCall:
    def share_and_give_back() -> None:
        manager.incref_blocks([*block_ids, *block_ids])
        if manager.refcount(block_ids[-1]) < 3:
            raise AssertionError("a block named twice gained one holder")
        manager.free_blocks(layer, [*block_ids, *block_ids])

    words = "incref_blocks of a list twice over, and free_blocks of it,"
    return BadCall(words, share_and_give_back)


def _plans(manager: KVBlockManager, layer: int, block_ids: list[int]) -> Iterator[BadCall]:
    plan = partial(manager.plan_append, layer)
    yield _refused("plan_append of one list twice", BadArgument, plan, [block_ids, block_ids])
    yield _refused("plan_append of two padding tokens", BadArgument, plan, [None], [2])
    for counts in ([1, 0], [1], [1, 1, 1]):
        words = f"plan_append of two lists for {counts} tokens"
        yield _refused(words, BadArgument, plan, [[], block_ids], counts)

    def write_a_plan(to_layer: int, later_plans: int) -> None:
        """Write a plan of only padding, which holds no block, after later plans."""
        first = plan([None])
        for _ in range(later_plans):
            plan([None])
        manager.write(first, to_layer, _tokens(manager, 1), _tokens(manager, 1))

    words = f"write of a plan that {_MORE_PLANS} others followed"
    yield _refused(words, StalePlan, write_a_plan, layer, _MORE_PLANS)
    if manager.num_layers > manager.layers_per_group:
        other = (layer + manager.layers_per_group) % manager.num_layers
        yield _refused("write of another layer's plan", BadArgument, write_a_plan, other, 0)


def _appends(manager: KVBlockManager, layer: int, lists: Sequence[list[int]]) -> Iterator[BadCall]:
    last_list, new = lists[-1], _tokens(manager, 2)
    append, batch = partial(manager.append_token, layer), partial(manager.append_token_batch, layer)
    words, errors = "append_token_batch to a tuple in its second row", (BadArgument, OutOfBlocks)
    yield _refused(words, errors, batch, [[], tuple(last_list)], new, new)
    if manager.num_free_blocks(layer):
        return
    for block_ids in lists:
        last = manager.block_info(block_ids[-1])
        if last.length == manager.block_size or manager.refcount(block_ids[-1]) > 1:
            words = "append_token that needs a block when none is free"
            yield _refused(words, OutOfBlocks, append, block_ids, new[0], new[0])


def _tokens(manager: KVBlockManager, rows: int) -> torch.Tensor:
    shape = (rows, manager.num_heads, manager.head_dim)
    return torch.ones(shape, dtype=manager.dtype, device=manager.device)


# Standard bad calls, and the methods that make them.


class MisusedManager(ReadManager):
    """Adapter that also makes bad calls, with blocks that no caller may name."""

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

    def decref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        self.manager.free_blocks(layer, self.ids(layer, blocks))

    def incref_blocks(self, layer: int, blocks: Sequence[int]) -> None:
        self.manager.incref_blocks(self.ids(layer, blocks))

    def gather_blocks(self, layer: int, blocks: list[int], length: int | None) -> object:
        return self.manager.gather_sequence(layer, self.ids(layer, blocks), length)

    def bad_calls(self) -> Iterable[BadCall]:
        return bad_calls(self.manager, list(self.lists.values()))


def held_blocks(kv: Any) -> str:
    """Describe the blocks of roseinfer's cache that are in use; "" if none is."""
    refcounts = {
        layer: kv.max_blocks_per_layer - 1 - kv.num_free_blocks(layer)
        for layer in range(0, kv.num_layers, kv.layers_per_group)
    }
    return ", ".join(f"{count} blocks of layer {at}" for at, count in refcounts.items() if count)
