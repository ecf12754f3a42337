"""What the block manager must refuse, made up for the state a manager is in."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pytest_roseinfer.adapters.cache import BadCall
from roseinfer import BadArgument, BadBlock, BadRefcount, OutOfBlocks, StalePlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roseinfer import KVBlockManager

_MORE_PLANS = 64
"""So many plans later a plan is too old to be written."""


def bad_calls(
    manager: KVBlockManager, sequences: Sequence[Sequence[list[int]]]
) -> Iterator[BadCall]:
    """``sequences`` hold a block list for each group of layers.

    The last list of the last group that has one is put in the wrong: what is checked for
    the first alone is checked too little.
    """
    for group in reversed(range(manager.num_layers // manager.layers_per_group)):
        lists = [own[group] for own in sequences if own[group]]
        if not lists:
            continue
        layer, own = group * manager.layers_per_group, lists[-1]
        yield from _reading(manager, layer, own)
        yield from _giving_back(manager, layer, own)
        if manager.layers_per_group == 1:
            yield from _appending(manager, layer, lists)
        yield from _planning(manager, layer, lists)
        yield from _sharing(manager, layer, own)
        return


def _foreign(manager: KVBlockManager, layer: int) -> dict[str, int]:
    """Ids that no list of this layer may hold, by what they are."""
    size = manager.max_blocks_per_layer
    first = layer // manager.layers_per_group * size
    foreign = {"the scratch block": first, "a block of the next layer": first + size + 1}
    if first:
        foreign["a block of the layer before"] = first - 1
    foreign["the next layer's scratch block"] = first + size
    for block in range(first + 1, first + size):
        if not manager.refcount(block):
            foreign["a free block"] = block
            break
    return foreign


def _stored(manager: KVBlockManager, own: list[int]) -> int:
    return sum(manager.block_info(block_id).length for block_id in own)


def _reading(manager: KVBlockManager, layer: int, own: list[int]) -> Iterator[BadCall]:
    for length in (_stored(manager, own) + 1, -1):
        yield BadCall(
            f"gather_sequence of {length} tokens, of which {_stored(manager, own)} are stored,",
            partial(manager.gather_sequence, layer, list(own), length),
            (BadArgument,),
        )
    for what, block in _foreign(manager, layer).items():
        yield BadCall(
            f"gather_sequence of {what}",
            partial(manager.gather_sequence, layer, [*own[:-1], block]),
            (BadBlock,),
        )


def _giving_back(manager: KVBlockManager, layer: int, own: list[int]) -> Iterator[BadCall]:
    for what, block in _foreign(manager, layer).items():
        yield BadCall(
            f"free_blocks of {what}, last in the list,",
            partial(manager.free_blocks, layer, [*own, block]),
            (BadBlock, BadRefcount),
        )
    times = manager.refcount(own[0]) + 1
    yield BadCall(
        f"free_blocks of a block {times} times that is held {times - 1} times",
        partial(manager.free_blocks, layer, [own[0]] * times),
        (BadRefcount,),
    )


def _sharing(manager: KVBlockManager, layer: int, own: list[int]) -> Iterator[BadCall]:
    for what, block in _foreign(manager, layer).items():
        if "next" in what or "before" in what:
            continue  # incref_blocks takes blocks of any layer
        yield BadCall(
            f"incref_blocks of {what}, last in the list,",
            partial(manager.incref_blocks, [*own, block]),
            (BadBlock,),
        )

    def share_and_give_back() -> None:
        manager.incref_blocks([*own, *own])
        if manager.refcount(own[-1]) < 3:
            raise AssertionError("a block named twice gained one holder")
        manager.free_blocks(layer, [*own, *own])

    yield BadCall("incref_blocks of a list twice over, and free_blocks of it,", share_and_give_back)


def _tokens(manager: KVBlockManager, rows: int) -> torch.Tensor:
    shape = (rows, manager.num_heads, manager.head_dim)
    return torch.ones(shape, dtype=manager.dtype, device=manager.device)


def _appending(
    manager: KVBlockManager, layer: int, lists: Sequence[list[int]]
) -> Iterator[BadCall]:
    own = lists[-1]
    new = _tokens(manager, 2)
    wrong = {
        "whose second row has a key of another shape": (new, new[:, :, :0]),
        "whose second tensor is one row short": (new, new[:1]),
        "of integers": (new.int(), new.int()),
    }
    for what, (key, value) in wrong.items():
        yield BadCall(
            f"append_token_batch {what}",
            partial(manager.append_token_batch, layer, [[], list(own)], key, value),
            (BadArgument,),
        )
    for what, block in _foreign(manager, layer).items():
        yield BadCall(
            f"append_token_batch to {what} in its second row",
            partial(manager.append_token_batch, layer, [[], [block]], new, new),
            (BadBlock,),
        )
        yield BadCall(
            f"append_token to {what}",
            partial(manager.append_token, layer, [block], new[0], new[0]),
            (BadBlock,),
        )
    yield BadCall(
        "append_token_batch to a tuple in its second row",
        partial(manager.append_token_batch, layer, [[], tuple(own)], new, new),  # type: ignore[list-item]
        (BadArgument, OutOfBlocks),
    )
    if manager.num_free_blocks(layer):
        return
    for block_ids in lists:
        last = manager.block_info(block_ids[-1])
        if last.length == manager.block_size or manager.refcount(block_ids[-1]) > 1:
            yield BadCall(
                "append_token that needs a block when none is free",
                partial(manager.append_token, layer, block_ids, new[0], new[0]),
                (OutOfBlocks,),
            )


def _planning(manager: KVBlockManager, layer: int, lists: Sequence[list[int]]) -> Iterator[BadCall]:
    own = lists[-1]
    plan = partial(manager.plan_append, layer)
    yield BadCall("plan_append of one list twice", partial(plan, [own, own]), (BadArgument,))
    if manager.refcount(own[-1]) == 1 and _stored(manager, own) % manager.block_size:
        yield BadCall(
            "plan_append of two lists with a partial block that has one holder",
            partial(plan, [own, list(own)]),
            (BadRefcount,),
        )
    for counts in ([1, 0], [1], [1, 1, 1]):
        yield BadCall(
            f"plan_append of two lists for {counts} tokens",
            partial(plan, [[], own], counts),
            (BadArgument,),
        )
    yield BadCall("plan_append of two padding tokens", partial(plan, [None], [2]), (BadArgument,))
    yield BadCall(
        f"write of a plan that {_MORE_PLANS} others followed",
        partial(_write_late, manager, layer),
        (StalePlan,),
    )
    if manager.num_layers > manager.layers_per_group:
        other = (layer + manager.layers_per_group) % manager.num_layers
        yield BadCall(
            "write of another layer's plan",
            partial(_write_beside, manager, layer, other),
            (BadArgument,),
        )


def _write_late(manager: KVBlockManager, layer: int) -> None:
    """Plans of nothing but padding, which hold no block."""
    first = manager.plan_append(layer, [None])
    for _ in range(_MORE_PLANS):
        manager.plan_append(layer, [None])
    manager.write(first, layer, _tokens(manager, 1), _tokens(manager, 1))


def _write_beside(manager: KVBlockManager, layer: int, other: int) -> None:
    plan = manager.plan_append(layer, [None])
    manager.write(plan, other, _tokens(manager, 1), _tokens(manager, 1))
