"""Calls that run out of blocks, at any row and for any reason: no side effects."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

import pytest

from roseinfer import AppendPolicy, KVBlockManager, OutOfBlocks
from tests.kv.scene import POLICIES, Call, RejectedCall, Scene, assert_rejected, build_scene
from tests.kv.twins import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def leave_free(kv: KVBlockManager, blocks: int) -> None:
    """Allocate all blocks of layer 0 except ``blocks``."""
    num_taken = kv.num_free_blocks(0) - blocks
    if num_taken:
        kv.plan_append(0, [[]], [num_taken * BLOCK_SIZE])


def scene_with(device: str, policy: AppendPolicy, free: int) -> Scene:
    scene = build_scene(device, policy)
    leave_free(scene.kv, free)
    return scene


def assert_out_of_blocks(scene: Scene, call: Callable[[Scene], Call], needed: int) -> None:
    """Assert that the call is rejected with the numbers of needed and free blocks."""
    free = scene.kv.num_free_blocks(0)
    words = f"layer 0 has {free} free blocks and {needed} are needed.*max_blocks_per_layer"
    error = assert_rejected(scene, RejectedCall(call, OutOfBlocks, words))
    assert isinstance(error, OutOfBlocks)
    assert (error.needed, error.free) == (needed, free)


def rows_needing_three(scene: Scene, order: tuple[int, ...] = (0, 1, 2, 3)) -> list[list[int]]:
    """Return four rows: in place, rollover, copy-on-write, and a new sequence."""
    lists = [scene.partial, scene.full, scene.shared, []]
    return [lists[row] for row in order]


@all_policies
@pytest.mark.parametrize("free", [0, 1, 2])
def test_batch_without_enough_blocks_is_rejected(
    device: str, policy: AppendPolicy, free: int
) -> None:
    """The first ``free`` rows that need a block could still get one."""
    scene = scene_with(device, policy, free)
    assert_out_of_blocks(scene, lambda scene: scene.append(rows_needing_three(scene)), needed=3)


@pytest.mark.parametrize("policy", [AppendPolicy(), AppendPolicy(batched=False)])
@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_batch_without_enough_blocks_is_rejected_in_any_order(
    device: str, policy: AppendPolicy, order: tuple[int, ...]
) -> None:
    scene = scene_with(device, policy, 2)
    assert_out_of_blocks(
        scene, lambda scene: scene.append(rows_needing_three(scene, order)), needed=3
    )


@all_policies
def test_batch_that_fits_exactly_is_appended(device: str, policy: AppendPolicy) -> None:
    scene = scene_with(device, policy, 3)
    function, *arguments = scene.append(rows_needing_three(scene))
    function(*arguments)
    assert scene.kv.num_free_blocks(0) == 0


@all_policies
def test_copy_on_write_without_a_block_is_rejected(device: str, policy: AppendPolicy) -> None:
    """The old block keeps both its references."""
    scene = scene_with(device, policy, 0)
    assert_out_of_blocks(scene, lambda scene: scene.append([scene.shared]), needed=1)
    assert scene.kv.refcount(scene.shared[0]) == 2


@all_policies
def test_last_holder_needs_no_block(device: str, policy: AppendPolicy) -> None:
    """Two holders in one batch need one block between them, not two."""
    scene = scene_with(device, policy, 1)
    function, *arguments = scene.append([scene.shared, scene.fork])
    function(*arguments)
    assert scene.kv.num_free_blocks(0) == 0
    assert scene.shared != scene.fork


ONE_TOKEN = {
    "fresh": lambda _: [],
    "rollover": lambda scene: scene.full,
    "copy_on_write": lambda scene: scene.fork,
}


@pytest.mark.parametrize("ids", ONE_TOKEN.values(), ids=ONE_TOKEN)
def test_append_token_without_a_block_is_rejected(
    device: str, ids: Callable[[Scene], list[int]]
) -> None:
    scene = scene_with(device, AppendPolicy(), 0)
    assert_out_of_blocks(scene, lambda scene: scene.append_one(ids(scene)), needed=1)


@all_policies
def test_in_place_append_works_in_a_full_pool(device: str, policy: AppendPolicy) -> None:
    scene = scene_with(device, policy, 0)
    function, *arguments = scene.append([scene.partial])
    function(*arguments)
    assert scene.kv.block_info(scene.partial[0]).length == 3


def test_plan_of_several_tokens_without_enough_blocks_is_rejected(device: str) -> None:
    """The needed blocks include those after each row's first token."""

    def call(scene: Scene) -> Call:
        lists = [scene.partial, scene.shared, []]
        return scene.kv.plan_append, 0, lists, [BLOCK_SIZE, 1, 2 * BLOCK_SIZE]

    assert_out_of_blocks(scene_with(device, AppendPolicy(), 3), call, needed=4)


def test_prompt_without_enough_blocks_is_rejected(device: str) -> None:
    def call(scene: Scene) -> Call:
        prompt = scene.kv.keys.new_zeros(1, 3, 2 * BLOCK_SIZE + 1, 5)
        return scene.kv.register_prefill_layer, 0, prompt, prompt

    assert_out_of_blocks(scene_with(device, AppendPolicy(), 2), call, needed=3)


def test_other_layers_can_still_allocate(device: str) -> None:
    scene = scene_with(device, AppendPolicy(), 0)
    free = scene.kv.num_free_blocks(1)
    scene.kv.append_token_batch(1, [[]], scene.tokens(1), scene.tokens(1))
    assert scene.kv.num_free_blocks(1) == free - 1


@all_policies
def test_call_succeeds_after_freeing(device: str, policy: AppendPolicy) -> None:
    scene = scene_with(device, policy, 2)
    function, *arguments = scene.append(rows_needing_three(scene))
    with pytest.raises(OutOfBlocks):
        function(*arguments)
    scene.kv.free_blocks(0, scene.fork)  # its block is no longer shared, so two suffice
    function(*arguments)
    assert scene.kv.num_free_blocks(0) == 0
