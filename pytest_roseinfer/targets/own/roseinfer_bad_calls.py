"""Calls that the block manager must refuse, beside the standard ones, in its present state."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pytest_roseinfer.adapters.cache import BadCall
from roseinfer import BadArgument, BadBlock, OutOfBlocks, StalePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from roseinfer import KVBlockManager

_MORE_PLANS = 64
"""After so many other plans, a plan is too old to be written."""


def bad_calls(
    manager: KVBlockManager, sequences: Sequence[Sequence[list[int]]]
) -> Iterator[BadCall]:
    """Misuse the last list of the last group of layers that has one.

    ``sequences`` hold a block list for each group. A manager that checks only its first group,
    or only the first row of a call, does not refuse these.
    """
    for group in reversed(range(manager.num_layers // manager.layers_per_group)):
        if lists := [own[group] for own in sequences if own[group]]:
            layer, own = group * manager.layers_per_group, lists[-1]
            yield _shared_and_given_back(manager, layer, own)
            yield from _plans(manager, layer, own)
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
    """Append a single token to blocks that the catalogue hands to whole batches."""
    size = manager.max_blocks_per_layer
    first = layer // manager.layers_per_group * size
    wrong = {"the scratch block": first, "a block of the next layer": first + size + 1}
    if unused := [block for block in range(first + 1, first + size) if not manager.refcount(block)]:
        wrong["a free block"] = unused[0]
    new = _tokens(manager, 1)[0]
    for what, block in wrong.items():
        words = f"append_token to {what}"
        yield _refused(words, BadBlock, manager.append_token, layer, [block], new, new)


def _shared_and_given_back(manager: KVBlockManager, layer: int, own: list[int]) -> BadCall:
    def share_and_give_back() -> None:
        manager.incref_blocks([*own, *own])
        if manager.refcount(own[-1]) < 3:
            raise AssertionError("a block named twice gained one holder")
        manager.free_blocks(layer, [*own, *own])

    words = "incref_blocks of a list twice over, and free_blocks of it,"
    return BadCall(words, share_and_give_back)


def _plans(manager: KVBlockManager, layer: int, own: list[int]) -> Iterator[BadCall]:
    plan = partial(manager.plan_append, layer)
    yield _refused("plan_append of one list twice", BadArgument, plan, [own, own])
    yield _refused("plan_append of two padding tokens", BadArgument, plan, [None], [2])
    for counts in ([1, 0], [1], [1, 1, 1]):
        words = f"plan_append of two lists for {counts} tokens"
        yield _refused(words, BadArgument, plan, [[], own], counts)

    def write_a_plan(to_layer: int, later_plans: int) -> None:
        """Write a plan of nothing but padding, which holds no block, after others."""
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
    own, new = lists[-1], _tokens(manager, 2)
    append, batch = partial(manager.append_token, layer), partial(manager.append_token_batch, layer)
    words, errors = "append_token_batch to a tuple in its second row", (BadArgument, OutOfBlocks)
    yield _refused(words, errors, batch, [[], tuple(own)], new, new)
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
