"""Layers grouped by window: blocks that leave it are freed, and groups share a pool."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, BadBlock, KVBlockManager, OutOfBlocks
from roseinfer.kv.groups import LayerGroup, group_layers_by_window

SIZE = 4
ALL = None


def cache(*windows: int | None, blocks: int = 20, device: str = "cpu", **more: Any) -> Any:
    policy = AppendPolicy(triton=False)
    return KVBlockManager(
        len(windows), 1, 2, SIZE, blocks + 1, device, torch.float32, policy, windows=windows, **more
    )


def append(kv: KVBlockManager, lists: list[list[int]], count: int, begin: int = 0) -> None:
    """Append tokens whose keys are their positions plus a hundred per layer."""
    plans = kv.plan_groups([lists], [count])
    for layer in range(kv.num_layers):
        key = torch.arange(begin, begin + count, device=kv.device).float() + 100 * layer
        key = key[:, None, None].expand(-1, 1, 2)
        kv.write(plans[kv.group_of(layer)], layer, key, -key)


def read(kv: KVBlockManager, lists: list[list[int]], layer: int) -> list[float]:
    keys, values = kv.gather_sequence(layer, lists[kv.group_of(layer)])
    assert torch.equal(keys, -values)
    found: list[float] = keys[0, :, 0].tolist()
    return found


def slide(kv: KVBlockManager, lists: list[list[int]], stored: int) -> list[int]:
    """Free the blocks that left their windows; return how many, per group."""
    pairs = zip(kv.groups, lists, strict=True)
    return [len(kv.give_back(group.layers[0], own, stored)) for group, own in pairs]


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((8, 8), [((0, 1), 8)]),
        ((8, ALL, 8, ALL), [((0, 2), 8), ((1, 3), ALL)]),
        ((8, 8, ALL, 8, 8, ALL, 8), [((0, 1), 8), ((3, 4), 8), ((6,), 8), ((2, 5), ALL)]),
        ((3, 5), [((0,), 3), ((1,), 5)]),
    ],
)
def test_groups_of_one_window_are_of_the_rarest_ones_size(windows: Any, groups: Any) -> None:
    assert group_layers_by_window(windows) == [LayerGroup(*each) for each in groups]


def test_a_pool_for_all_groups_and_a_plane_for_each_layer_of_one(device: str) -> None:
    kv = cache(5, ALL, 5, ALL, device=device)
    assert len(kv.keys) == 2
    lists: list[list[int]] = [[], []]
    append(kv, lists, 6)
    assert not {*lists[0]} & {*lists[1]}
    assert kv.num_free_blocks(0) == kv.num_free_blocks(1) == 16
    for layer in range(4):
        assert read(kv, lists, layer) == [100 * layer + at for at in range(6)]


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_what_the_next_token_sees_stays(device: str, window: int) -> None:
    """A block is freed when the next token attends to none of it, and not before."""
    kv = cache(window, ALL, device=device)
    lists: list[list[int]] = [[], []]
    for stored in range(1, 20):
        append(kv, lists, 1, stored - 1)
        slide(kv, lists, stored)
        first = max(0, stored - window + 1)
        assert read(kv, lists, 0) == list(range(first - first % SIZE, stored))
        assert read(kv, lists, 1) == [100.0 + at for at in range(stored)]
        assert kv.num_free_blocks(0) == 20 - -(-stored // SIZE) - (
            -(-stored // SIZE) - first // SIZE
        )


def test_what_is_given_back_is_another_ones(device: str) -> None:
    """In a pool too small for it, a long sequence continues while its window fits."""
    kv = cache(6, blocks=3, device=device)
    lists: list[list[int]] = [[]]
    for stored in range(1, 40):
        append(kv, lists, 1, stored - 1)
        slide(kv, lists, stored)
    assert read(kv, lists, 0)[-5:] == [34.0, 35.0, 36.0, 37.0, 38.0]
    kv.free_blocks(0, lists[0])
    assert kv.num_free_blocks(0) == 3


def test_no_group_is_planned_where_one_finds_no_room(device: str) -> None:
    kv = cache(6, ALL, blocks=3, device=device)
    lists: list[list[int]] = [[], []]
    append(kv, lists, 4)
    with pytest.raises(OutOfBlocks):
        kv.plan_groups([lists], [1])
    assert [len(own) for own in lists] == [1, 1]
    assert kv.num_free_blocks(0) == 1


def test_a_fork_keeps_what_its_parent_gives_back(device: str) -> None:
    kv = cache(3, ALL, device=device)
    parent: list[list[int]] = [[], []]
    append(kv, parent, 4)
    child = [list(own) for own in parent]
    for own in child:
        kv.incref_blocks(own)
    append(kv, parent, 4, 4)
    assert slide(kv, parent, 8) == [1, 0]
    assert read(kv, child, 0) == [0, 1, 2, 3]
    assert kv.refcount(child[0][0]) == 1


@pytest.mark.parametrize("length", [10, 9, 8, 0])
def test_a_cut_behind_what_was_given_back(device: str, length: int) -> None:
    kv = cache(3, ALL, device=device)
    lists: list[list[int]] = [[], []]
    append(kv, lists, 11)
    assert slide(kv, lists, 11) == [2, 0]
    if length == 9:
        before = [list(own) for own in lists]
        with pytest.raises(BadArgument, match="were freed when they left the window of 3"):
            kv.truncate_groups([lists], [length])
        assert lists == before
        return
    if length == 8:
        with pytest.raises(BadArgument, match="truncate to 8: the next token would attend to"):
            kv.truncate(0, lists[0], length)
        return
    kv.truncate_groups([lists], [length])
    assert read(kv, lists, 0) == ([8.0, 9.0] if length else [])
    assert read(kv, lists, 1) == [100.0 + at for at in range(length)]
    assert [len(own) for own in lists] == ([3, 3] if length else [0, 0])


def test_a_cut_that_cannot_be_is_told_before_one_that_finds_no_room(device: str) -> None:
    kv = cache(2, ALL, blocks=4, device=device)
    first: list[list[int]] = [[], []]
    append(kv, first, 7)
    second = [list(own) for own in first]
    for own in second:
        kv.incref_blocks(own)
    assert slide(kv, second, 7) == [1, 0]
    assert kv.num_free_blocks(0) == 0
    with pytest.raises(BadArgument, match="were freed when"):
        kv.truncate_groups([second], [3])
    with pytest.raises(OutOfBlocks):
        kv.truncate_groups([second], [6])
    assert kv.num_free_blocks(0) == 0


def test_a_sequence_is_cut_in_all_groups_before_the_next(device: str) -> None:
    """Else the first group's copies would use blocks that the third sequence frees there."""
    kv = cache(3, ALL, blocks=7, device=device)
    first: list[list[int]] = [[], []]
    third: list[list[int]] = [[], []]
    append(kv, first, 4)
    append(kv, third, 4)
    forks = [[list(own) for own in first] for _ in range(2)]
    for own in chain.from_iterable(forks):
        kv.incref_blocks(own)
    assert kv.num_free_blocks(0) == 3
    with pytest.raises(OutOfBlocks):
        kv.truncate_groups([*forks, third], [3, 3, 0])
    kv.truncate_groups([third, *forks], [0, 3, 3])
    assert kv.num_free_blocks(0) == 1
    for lists in forks:
        assert read(kv, lists, 1) == [100.0 + at for at in range(3)]
    assert read(kv, first, 1) == [100.0 + at for at in range(4)]


def test_scratch_is_no_block_where_nothing_is_given_back(device: str) -> None:
    kv = cache(3, ALL, device=device)
    with pytest.raises(BadBlock, match="scratch"):
        kv.gather_sequence(1, [0, 1])
    with pytest.raises(BadBlock, match="scratch"):
        kv.free_blocks(1, [0])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"windows": (3,)}, "1 windows for 2 layers"),
        ({"windows": (3, 0)}, "a window must be at least 1, not 0"),
        ({"windows": (3, "4")}, "a window must be a whole number, not '4'"),
    ],
)
def test_windows_that_make_no_sense(more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        KVBlockManager(2, 1, 2, SIZE, 9, "cpu", torch.float32, **more)


def test_calls_of_one_layer_alone_are_refused(device: str) -> None:
    kv = cache(3, ALL, device=device)
    with pytest.raises(BadArgument, match="appends to one layer"):
        kv.append_token(0, [], torch.zeros(1, 2), torch.zeros(1, 2))
