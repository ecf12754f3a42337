"""Calls that the block manager must refuse, made up for the state that a manager is in."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pytest_roseinfer.adapters.cache import BadCall
from roseinfer import BadArgument, BadBlock, BadRefcount, OutOfBlocks, StalePlan

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
            yield from _blocks_of_others(manager, layer, own)
            yield from _lengths_and_holders(manager, layer, own)
            yield from _plans(manager, layer, own)
            if manager.layers_per_group == 1:
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


def _blocks_of_others(manager: KVBlockManager, layer: int, own: list[int]) -> Iterator[BadCall]:
    free, gather = (partial(call, layer) for call in (manager.free_blocks, manager.gather_sequence))
    size = manager.max_blocks_per_layer
    first = layer // manager.layers_per_group * size
    never_held = {"the scratch block": first}
    held_elsewhere = {
        "a block of the next layer": first + size + 1,
        "the next layer's scratch block": first + size,
    }
    if first:
        held_elsewhere["a block of the layer before"] = first - 1
    unused = [block for block in range(first + 1, first + size) if not manager.refcount(block)]
    if unused:
        never_held["a free block"] = unused[0]
    for what, block in {**never_held, **held_elsewhere}.items():
        yield _refused(f"gather_sequence of {what}", BadBlock, gather, [*own[:-1], block])
        errors = (BadBlock, BadRefcount)
        yield _refused(f"free_blocks of {what}, last in the list,", errors, free, [*own, block])
        if manager.layers_per_group == 1:
            new = _tokens(manager, 2)
            append, batch = manager.append_token, manager.append_token_batch
            words = f"append_token_batch to {what} in its second row"
            yield _refused(words, BadBlock, batch, layer, [[], [block]], new, new)
            words = f"append_token to {what}"
            yield _refused(words, BadBlock, append, layer, [block], new[0], new[0])
    for what, block in never_held.items():  # incref_blocks takes blocks of any layer
        words = f"incref_blocks of {what}, last in the list,"
        yield _refused(words, BadBlock, manager.incref_blocks, [*own, block])


def _lengths_and_holders(manager: KVBlockManager, layer: int, own: list[int]) -> Iterator[BadCall]:
    stored = _stored(manager, own)
    for length in (stored + 1, -1):
        words = f"gather_sequence of {length} tokens, of which {stored} are stored,"
        yield _refused(words, BadArgument, manager.gather_sequence, layer, list(own), length)
    held = manager.refcount(own[0])
    words = f"free_blocks of a block {held + 1} times that is held {held} times"
    yield _refused(words, BadRefcount, manager.free_blocks, layer, [own[0]] * (held + 1))

    def share_and_give_back() -> None:
        manager.incref_blocks([*own, *own])
        if manager.refcount(own[-1]) < 3:
            raise AssertionError("a block named twice gained one holder")
        manager.free_blocks(layer, [*own, *own])

    yield BadCall("incref_blocks of a list twice over, and free_blocks of it,", share_and_give_back)


def _plans(manager: KVBlockManager, layer: int, own: list[int]) -> Iterator[BadCall]:
    plan = partial(manager.plan_append, layer)
    yield _refused("plan_append of one list twice", BadArgument, plan, [own, own])
    yield _refused("plan_append of two padding tokens", BadArgument, plan, [None], [2])
    for counts in ([1, 0], [1], [1, 1, 1]):
        words = f"plan_append of two lists for {counts} tokens"
        yield _refused(words, BadArgument, plan, [[], own], counts)
    if manager.refcount(own[-1]) == 1 and _stored(manager, own) % manager.block_size:
        words = "plan_append of two lists with a partial block that has one holder"
        yield _refused(words, BadRefcount, plan, [own, list(own)])

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
    wrong = {
        "whose second row has a key of another shape": (new, new[:, :, :0]),
        "whose second tensor is one row short": (new, new[:1]),
        "of integers": (new.int(), new.int()),
    }
    for what, tensors in wrong.items():
        words = f"append_token_batch {what}"
        yield _refused(words, BadArgument, batch, [[], list(own)], *tensors)
    words, errors = "append_token_batch to a tuple in its second row", (BadArgument, OutOfBlocks)
    yield _refused(words, errors, batch, [[], tuple(own)], new, new)
    if manager.num_free_blocks(layer):
        return
    for block_ids in lists:
        last = manager.block_info(block_ids[-1])
        if last.length == manager.block_size or manager.refcount(block_ids[-1]) > 1:
            words = "append_token that needs a block when none is free"
            yield _refused(words, OutOfBlocks, append, block_ids, new[0], new[0])


def _stored(manager: KVBlockManager, own: list[int]) -> int:
    return sum(manager.block_info(block_id).length for block_id in own)


def _tokens(manager: KVBlockManager, rows: int) -> torch.Tensor:
    shape = (rows, manager.num_heads, manager.head_dim)
    return torch.ones(shape, dtype=manager.dtype, device=manager.device)
