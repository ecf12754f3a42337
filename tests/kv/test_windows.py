"""Layers grouped by window: blocks out of the window are freed, and groups share a pool."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, BadBlock, KVBlockManager, OutOfBlocks
from roseinfer.kv.groups import LayerGroup, group_layers_by_window

BLOCK_SIZE = 4
NO_WINDOW = None


def build_cache(*windows: int | None, blocks: int = 20, device: str = "cpu", **more: Any) -> Any:
    policy = AppendPolicy(triton=False)
    return KVBlockManager(
        len(windows),
        1,
        2,
        BLOCK_SIZE,
        blocks + 1,
        device,
        torch.float32,
        policy,
        windows=windows,
        **more,
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
    tokens: list[float] = keys[0, :, 0].tolist()
    return tokens


def free_out_of_window(kv: KVBlockManager, lists: list[list[int]], stored: int) -> list[int]:
    """Free the blocks that left their windows; return the number freed per group."""
    pairs = zip(kv.groups, lists, strict=True)
    return [
        len(kv.free_out_of_window(group.layers[0], group_list, stored))
        for group, group_list in pairs
    ]


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((8, 8), [((0, 1), 8)]),
        ((8, NO_WINDOW, 8, NO_WINDOW), [((0, 2), 8), ((1, 3), NO_WINDOW)]),
        (
            (8, 8, NO_WINDOW, 8, 8, NO_WINDOW, 8),
            [((0, 1), 8), ((3, 4), 8), ((6,), 8), ((2, 5), NO_WINDOW)],
        ),
        ((3, 5), [((0,), 3), ((1,), 5)]),
    ],
)
def test_groups_have_the_size_of_the_rarest_window(windows: Any, groups: Any) -> None:
    assert group_layers_by_window(windows) == [LayerGroup(*each) for each in groups]


def test_groups_share_a_pool(device: str) -> None:
    kv = build_cache(5, NO_WINDOW, 5, NO_WINDOW, device=device)
    assert len(kv.keys) == 2
    lists: list[list[int]] = [[], []]
    append(kv, lists, 6)
    assert not {*lists[0]} & {*lists[1]}
    assert kv.num_free_blocks(0) == kv.num_free_blocks(1) == 16
    for layer in range(4):
        assert read(kv, lists, layer) == [100 * layer + at for at in range(6)]


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_blocks_within_the_window_are_kept(device: str, window: int) -> None:
    """A block is freed when the next token attends to none of it, and not before."""
    kv = build_cache(window, NO_WINDOW, device=device)
    lists: list[list[int]] = [[], []]
    for stored in range(1, 20):
        append(kv, lists, 1, stored - 1)
        free_out_of_window(kv, lists, stored)
        first = max(0, stored - window + 1)
        assert read(kv, lists, 0) == list(range(first - first % BLOCK_SIZE, stored))
        assert read(kv, lists, 1) == [100.0 + at for at in range(stored)]
        assert kv.num_free_blocks(0) == 20 - -(-stored // BLOCK_SIZE) - (
            -(-stored // BLOCK_SIZE) - first // BLOCK_SIZE
        )


def test_freed_blocks_are_reused(device: str) -> None:
    """In a pool too small for it, a long sequence continues while its window fits."""
    kv = build_cache(6, blocks=3, device=device)
    lists: list[list[int]] = [[]]
    for stored in range(1, 40):
        append(kv, lists, 1, stored - 1)
        free_out_of_window(kv, lists, stored)
    assert read(kv, lists, 0)[-5:] == [34.0, 35.0, 36.0, 37.0, 38.0]
    kv.free_blocks(0, lists[0])
    assert kv.num_free_blocks(0) == 3


def test_no_group_is_planned_if_one_is_out_of_blocks(device: str) -> None:
    kv = build_cache(6, NO_WINDOW, blocks=3, device=device)
    lists: list[list[int]] = [[], []]
    append(kv, lists, 4)
    with pytest.raises(OutOfBlocks):
        kv.plan_groups([lists], [1])
    assert [len(group_list) for group_list in lists] == [1, 1]
    assert kv.num_free_blocks(0) == 1


def test_fork_keeps_blocks_that_its_parent_frees(device: str) -> None:
    kv = build_cache(3, NO_WINDOW, device=device)
    parent: list[list[int]] = [[], []]
    append(kv, parent, 4)
    child = [list(group_list) for group_list in parent]
    for group_list in child:
        kv.incref_blocks(group_list)
    append(kv, parent, 4, 4)
    assert free_out_of_window(kv, parent, 8) == [1, 0]
    assert read(kv, child, 0) == [0, 1, 2, 3]
    assert kv.refcount(child[0][0]) == 1


@pytest.mark.parametrize("length", [10, 9, 8, 0])
def test_truncate_after_blocks_left_the_window(device: str, length: int) -> None:
    kv = build_cache(3, NO_WINDOW, device=device)
    lists: list[list[int]] = [[], []]
    append(kv, lists, 11)
    assert free_out_of_window(kv, lists, 11) == [2, 0]
    if length == 9:
        before = [list(group_list) for group_list in lists]
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
    assert [len(group_list) for group_list in lists] == ([3, 3] if length else [0, 0])


def test_invalid_truncation_is_reported_before_lack_of_blocks(device: str) -> None:
    kv = build_cache(2, NO_WINDOW, blocks=4, device=device)
    first: list[list[int]] = [[], []]
    append(kv, first, 7)
    second = [list(group_list) for group_list in first]
    for group_list in second:
        kv.incref_blocks(group_list)
    assert free_out_of_window(kv, second, 7) == [1, 0]
    assert kv.num_free_blocks(0) == 0
    with pytest.raises(BadArgument, match="were freed when"):
        kv.truncate_groups([second], [3])
    with pytest.raises(OutOfBlocks):
        kv.truncate_groups([second], [6])
    assert kv.num_free_blocks(0) == 0


def test_sequence_is_truncated_in_all_groups_before_the_next(device: str) -> None:
    """Otherwise the first group's copies would use blocks that the third sequence frees there."""
    kv = build_cache(3, NO_WINDOW, blocks=7, device=device)
    first: list[list[int]] = [[], []]
    third: list[list[int]] = [[], []]
    append(kv, first, 4)
    append(kv, third, 4)
    forks = [[list(group_list) for group_list in first] for _ in range(2)]
    for group_list in chain.from_iterable(forks):
        kv.incref_blocks(group_list)
    assert kv.num_free_blocks(0) == 3
    with pytest.raises(OutOfBlocks):
        kv.truncate_groups([*forks, third], [3, 3, 0])
    kv.truncate_groups([third, *forks], [0, 3, 3])
    assert kv.num_free_blocks(0) == 1
    for lists in forks:
        assert read(kv, lists, 1) == [100.0 + at for at in range(3)]
    assert read(kv, first, 1) == [100.0 + at for at in range(4)]


def test_scratch_block_is_rejected_without_freed_blocks(device: str) -> None:
    kv = build_cache(3, NO_WINDOW, device=device)
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
def test_invalid_windows_are_rejected(more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        KVBlockManager(2, 1, 2, BLOCK_SIZE, 9, "cpu", torch.float32, **more)


def test_single_layer_calls_are_rejected_with_windows(device: str) -> None:
    kv = build_cache(3, NO_WINDOW, device=device)
    with pytest.raises(BadArgument, match="appends to one layer"):
        kv.append_token(0, [], torch.zeros(1, 2), torch.zeros(1, 2))
