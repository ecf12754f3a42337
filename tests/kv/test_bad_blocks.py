"""Invalid, freed or foreign block ids: rejected without side effects."""

from __future__ import annotations

import pytest

from roseinfer import AppendPolicy, BadArgument, BadBlock, BadRefcount
from tests.kv.scene import POLICIES, Call, RejectedCall, Scene, assert_rejected, build_scene

UNKNOWN = 10**6
NEVER_USED = 20
SCRATCH = 0
OTHER_SCRATCH = 24

BAD_IDS = {
    "unknown": (lambda _: UNKNOWN, r"block 1000000 does not belong to layer 0.* 1 to 23"),
    "negative": (lambda _: -1, r"block -1 does not belong to layer 0.* 1 to 23"),
    "other_layer": (
        lambda scene: scene.other_layer[0],
        r"block 25 does not belong to layer 0.* 1 to 23",
    ),
    "scratch": (lambda _: SCRATCH, r"block 0 is layer 0's scratch block"),
    "freed": (lambda scene: scene.free_id, r"block 4 of layer 0 is free: no sequence holds it"),
    "never_used": (lambda _: NEVER_USED, r"block 20 of layer 0 is free: no sequence holds it"),
}

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
all_bad_ids = pytest.mark.parametrize(("bad", "words"), BAD_IDS.values(), ids=BAD_IDS)


@all_policies
@all_bad_ids
@pytest.mark.parametrize("row", [0, 1, 2])
def test_bad_block_in_any_row_of_a_batch_is_rejected(
    device: str, policy: AppendPolicy, bad: object, words: str, row: int
) -> None:
    def call(scene: Scene) -> Call:
        lists = [scene.partial, scene.full]
        lists.insert(row, [bad_id_of(bad, scene)])
        return scene.append(lists)

    assert_rejected(build_scene(device, policy), RejectedCall(call, BadBlock, words))


def bad_id_of(bad: object, scene: Scene) -> int:
    assert callable(bad)
    return int(bad(scene))


@all_bad_ids
def test_bad_block_at_the_end_of_a_list_is_rejected(device: str, bad: object, words: str) -> None:
    def call(scene: Scene) -> Call:
        return scene.append_one([*scene.full, bad_id_of(bad, scene)])

    assert_rejected(build_scene(device, AppendPolicy()), RejectedCall(call, BadBlock, words))


@all_bad_ids
def test_bad_block_in_a_plan_is_rejected(device: str, bad: object, words: str) -> None:
    def call(scene: Scene) -> Call:
        return scene.kv.plan_append, 0, [scene.partial, [bad_id_of(bad, scene)]], [2, 9]

    assert_rejected(build_scene(device, AppendPolicy()), RejectedCall(call, BadBlock, words))


@all_bad_ids
@pytest.mark.parametrize("at", [0, 1])
def test_bad_block_in_a_list_to_gather_is_rejected(
    device: str, bad: object, words: str, at: int
) -> None:
    def call(scene: Scene) -> Call:
        ids = list(scene.full)
        ids.insert(at, bad_id_of(bad, scene))
        return scene.kv.gather_sequence, 0, ids

    assert_rejected(build_scene(device, AppendPolicy()), RejectedCall(call, BadBlock, words))


HOLDABLE = {name: BAD_IDS[name] for name in BAD_IDS if name not in ("freed", "never_used")}


@pytest.mark.parametrize(("bad", "words"), HOLDABLE.values(), ids=HOLDABLE)
@pytest.mark.parametrize("at", [0, 1])
def test_bad_block_in_a_list_to_free_is_rejected(
    device: str, bad: object, words: str, at: int
) -> None:
    """No block is freed before the bad id is found, wherever in the list it is."""

    def call(scene: Scene) -> Call:
        ids = list(scene.partial)
        ids.insert(at, bad_id_of(bad, scene))
        return scene.kv.free_blocks, 0, ids

    assert_rejected(build_scene(device, AppendPolicy()), RejectedCall(call, BadBlock, words))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (-1, "block -1 does not belong"),
        (UNKNOWN, "block 1000000 does not belong to layer 1"),
        (SCRATCH, "layer 0's scratch block"),
        (OTHER_SCRATCH, "layer 1's scratch block"),
        (NEVER_USED, "block 20 of layer 0 is free"),
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_bad_block_in_a_list_to_share_is_rejected(
    device: str, bad: int, words: str, at: int
) -> None:
    def call(scene: Scene) -> Call:
        ids = list(scene.partial)
        ids.insert(at, bad)
        return scene.kv.incref_blocks, ids

    assert_rejected(build_scene(device, AppendPolicy()), RejectedCall(call, BadBlock, words))


def test_sharing_a_freed_block_is_rejected(device: str) -> None:
    def call(scene: Scene) -> Call:
        return scene.kv.incref_blocks, [*scene.partial, scene.free_id]

    case = RejectedCall(call, BadBlock, "block 4 of layer 0 is free: no sequence holds it")
    assert_rejected(build_scene(device, AppendPolicy()), case)


@pytest.mark.parametrize("reader", ["refcount", "block_info"])
@pytest.mark.parametrize("bad", [-1, UNKNOWN, 48, SCRATCH, OTHER_SCRATCH])
def test_queries_of_a_bad_block_are_rejected(device: str, reader: str, bad: int) -> None:
    case = RejectedCall(lambda scene: (getattr(scene.kv, reader), bad), BadBlock, f"block {bad} ")
    assert_rejected(build_scene(device, AppendPolicy()), case)


FREED_TOO_OFTEN = {
    "not_held": (lambda scene: [scene.free_id], "block 4 .* held 0 times .* freed 1 times"),
    "never_used": (lambda _: [NEVER_USED], "block 20 .* held 0 times .* freed 1 times"),
    "twice_in_one_call": (
        lambda scene: scene.partial * 2,
        "block 1 .* held 1 times .* freed 2 times",
    ),
    "shared_thrice_in_one_call": (
        lambda scene: scene.shared + scene.fork + scene.shared,
        "block 3 .* held 2 times .* freed 3 times",
    ),
    "last_of_many": (
        lambda scene: [*scene.partial, *scene.full, scene.free_id],
        "block 4 .* held 0 times",
    ),
}


@pytest.mark.parametrize(("ids", "words"), FREED_TOO_OFTEN.values(), ids=FREED_TOO_OFTEN)
def test_freeing_more_references_than_held_is_rejected(
    device: str, ids: object, words: str
) -> None:
    assert callable(ids)
    case = RejectedCall(lambda scene: (scene.kv.free_blocks, 0, ids(scene)), BadRefcount, words)
    assert_rejected(build_scene(device, AppendPolicy()), case)


def test_freeing_all_references_in_one_call(device: str) -> None:
    """The limit itself is valid: both references may be released at once."""
    scene = build_scene(device, AppendPolicy())
    free = scene.kv.num_free_blocks(0)
    scene.kv.free_blocks(0, scene.shared + scene.fork)
    assert scene.kv.num_free_blocks(0) == free + 1


@all_policies
@pytest.mark.parametrize("first", [True, False])
def test_two_lists_on_a_partial_block_with_one_reference_are_rejected(
    device: str, policy: AppendPolicy, first: bool
) -> None:
    """Both rows would write the same slot, since ``incref_blocks`` was not called."""

    def call(scene: Scene) -> Call:
        lists = [scene.partial, list(scene.partial)]
        lists.insert(0 if first else 1, scene.full)
        return scene.append(lists)

    words = "block index 1 .* more rows than hold it: incref_blocks"
    assert_rejected(build_scene(device, policy), RejectedCall(call, BadRefcount, words))


@all_policies
def test_three_lists_on_a_partial_block_with_two_references_are_rejected(
    device: str, policy: AppendPolicy
) -> None:
    def call(scene: Scene) -> Call:
        return scene.append([scene.shared, scene.fork, list(scene.shared)])

    words = "block index 3 .* more rows than hold it: incref_blocks"
    assert_rejected(build_scene(device, policy), RejectedCall(call, BadRefcount, words))


@all_policies
@pytest.mark.parametrize("name", ["partial", "full", "shared"])
def test_same_list_twice_is_rejected(device: str, policy: AppendPolicy, name: str) -> None:
    """The list is rejected whatever it ends in; two equal lists are valid."""

    def call(scene: Scene) -> Call:
        ids = getattr(scene, name)
        return scene.append([ids, scene.other_layer[:0], ids])

    case = RejectedCall(call, BadArgument, "row 2 is the same list object as row 0")
    assert_rejected(build_scene(device, policy), case)


def test_same_empty_list_twice_is_rejected(device: str) -> None:
    def call(scene: Scene) -> Call:
        new: list[int] = []
        return scene.append([scene.partial, new, new])

    case = RejectedCall(call, BadArgument, "row 2 is the same list object as row 1")
    assert_rejected(build_scene(device, AppendPolicy()), case)


def test_list_with_a_partial_block_in_the_middle_is_rejected(device: str) -> None:
    """Reading past a partial block would read tokens that were never stored."""

    def call(scene: Scene) -> Call:
        return scene.kv.gather_sequence, 0, scene.partial + scene.full

    case = RejectedCall(call, BadArgument, "block 1 holds 2 of 4 tokens and is not the last")
    assert_rejected(build_scene(device, AppendPolicy()), case)
