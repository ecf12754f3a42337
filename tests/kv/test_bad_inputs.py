"""Invalid tensors, lists and numbers: rejected without side effects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, KVBlockManager
from roseinfer.kv.groups import validate_device
from tests.kv.scene import POLICIES, Call, RejectedCall, Scene, assert_rejected, build_scene
from tests.kv.twins import SIZES

if TYPE_CHECKING:
    from collections.abc import Callable

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def two_lists(scene: Scene) -> list[list[int]]:
    return [scene.partial, scene.full]


BATCH_SHAPES = {
    "too_few_rows": (1, 3, 5),
    "too_many_rows": (3, 3, 5),
    "heads": (2, 4, 5),
    "head_dim": (2, 3, 6),
    "transposed": (2, 5, 3),
    "no_batch": (3, 5),
    "extra_dimension": (1, 2, 3, 5),
    "nothing": (0,),
}


@all_policies
@pytest.mark.parametrize("shape", BATCH_SHAPES.values(), ids=BATCH_SHAPES)
@pytest.mark.parametrize("name", ["key", "value"])
def test_batch_of_a_wrong_shape_is_rejected(
    device: str, policy: AppendPolicy, shape: tuple[int, ...], name: str
) -> None:
    def call(scene: Scene) -> Call:
        tensors: dict[str, Any] = {name: scene.kv.keys.new_zeros(shape)}
        return scene.append(two_lists(scene), **tensors)

    words = rf"key and value must be \[2, 3, 5\]; they are .*\[{', '.join(map(str, shape))}\]"
    assert_rejected(build_scene(device, policy), RejectedCall(call, BadArgument, words))


@pytest.mark.parametrize("shape", [(5,), (3, 6), (4, 5), (1, 3, 5)])
@pytest.mark.parametrize("name", ["key", "value"])
def test_token_of_a_wrong_shape_is_rejected(device: str, shape: tuple[int, ...], name: str) -> None:
    def call(scene: Scene) -> Call:
        tensors: dict[str, Any] = {name: scene.kv.keys.new_zeros(shape)}
        return scene.append_one(scene.partial, **tensors)

    case = RejectedCall(call, BadArgument, r"key and value must be \[3, 5\]; they are ")
    assert_rejected(build_scene(device, AppendPolicy()), case)


@pytest.mark.parametrize(
    "shape", [(3, 4, 5), (2, 3, 4, 5), (1, 4, 4, 5), (1, 3, 4, 6), (1, 4, 3, 5), (1, 3, 4, 5, 1)]
)
@pytest.mark.parametrize("name", ["key", "value"])
def test_prompt_of_a_wrong_shape_is_rejected(
    device: str, shape: tuple[int, ...], name: str
) -> None:
    def call(scene: Scene) -> Call:
        good = scene.kv.keys.new_zeros(1, 3, 4, 5)
        pair = {"key": good, "value": good} | {name: scene.kv.keys.new_zeros(shape)}
        return scene.kv.register_prefill_layer, 0, pair["key"], pair["value"]

    case = RejectedCall(call, BadArgument, "key and value must be .*; they are ")
    assert_rejected(build_scene(device, AppendPolicy()), case)


def test_prompt_keys_and_values_of_different_lengths_are_rejected(device: str) -> None:
    def call(scene: Scene) -> Call:
        key, value = scene.kv.keys.new_zeros(1, 3, 4, 5), scene.kv.keys.new_zeros(1, 3, 6, 5)
        return scene.kv.register_prefill_layer, 0, key, value

    case = RejectedCall(call, BadArgument, r"\[1, 3, 4, 5\] and \[1, 3, 6, 5\]")
    assert_rejected(build_scene(device, AppendPolicy()), case)


@all_policies
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("name", ["key", "value"])
def test_tensors_that_are_not_floats_are_rejected(
    device: str, policy: AppendPolicy, dtype: torch.dtype, name: str
) -> None:
    def call(scene: Scene) -> Call:
        tensors: dict[str, Any] = {name: scene.tokens(2).to(dtype)}
        return scene.append(two_lists(scene), **tensors)

    case = RejectedCall(call, BadArgument, f"key and value must be floats; they are .*{dtype}")
    assert_rejected(build_scene(device, policy), case)


CALLS: dict[str, Callable[[Scene, torch.Tensor, torch.Tensor], Any]] = {
    "append_token": lambda s, k, v: s.append_one(s.partial, k[0], v[0]),
    "append_token_batch": lambda s, k, v: s.append(two_lists(s), k, v),
    "register_prefill_layer": lambda s, k, v: (
        s.kv.register_prefill_layer,
        0,
        k[None].transpose(1, 2),
        v[None].transpose(1, 2),
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", ["key", "value"])
def test_tensor_on_another_device_is_rejected(device: str, call: Any, name: str) -> None:
    def call_with_moved_tensor(scene: Scene) -> Any:
        pair = {"key": scene.tokens(2), "value": scene.tokens(2)}
        pair[name] = pair[name].to(scene.other_device)
        return call(scene, pair["key"], pair["value"])

    scene = build_scene(device, AppendPolicy())
    at = {"key": str(scene.kv.device), "value": str(scene.kv.device), name: scene.other_device}
    words = f"the cache is on {scene.kv.device}; key is on {at['key']}, value on {at['value']}"
    assert_rejected(scene, RejectedCall(call_with_moved_tensor, BadArgument, words))


def test_write_of_a_tensor_on_another_device_is_rejected(device: str) -> None:
    scene = build_scene(device, AppendPolicy())
    plan = scene.kv.plan_append(0, [scene.partial])

    def call(scene: Scene) -> Call:
        return scene.kv.write, plan, 0, scene.tokens(1), scene.tokens(1).to(scene.other_device)

    words = f"the cache is on {scene.kv.device}.*value on {scene.other_device}"
    assert_rejected(scene, RejectedCall(call, BadArgument, words))


@all_policies
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("block_list", [(), (1,), 1, "1"], ids=repr)
def test_block_list_of_another_type_is_rejected_with_its_row(
    device: str, policy: AppendPolicy, row: int, block_list: object
) -> None:
    """A list of another type could not be changed in place; the error names the row."""

    def call(scene: Scene) -> Call:
        lists: list[object] = [scene.full]
        lists.insert(row, block_list)
        return scene.append(lists)

    case = RejectedCall(call, BadArgument, f"row {row}: a block list must be a list, not ")
    assert_rejected(build_scene(device, policy), case)


@pytest.mark.parametrize("block_list", [(), (1,), None], ids=repr)
def test_append_token_rejects_block_lists_of_other_types(device: str, block_list: object) -> None:
    case = RejectedCall(
        lambda scene: scene.append_one(block_list), BadArgument, "a block list must be a list, not "
    )
    assert_rejected(build_scene(device, AppendPolicy()), case)


def prompt(scene: Scene) -> torch.Tensor:
    return scene.kv.keys.new_zeros(1, 3, 4, 5)


CALLS_WITH_LAYER: dict[str, Callable[[Scene, int], Any]] = {
    "append_token": lambda s, layer: s.append_one(s.partial, layer=layer),
    "append_token_batch": lambda s, layer: s.append(two_lists(s), layer=layer),
    "register_prefill_layer": lambda s, layer: (
        s.kv.register_prefill_layer,
        layer,
        prompt(s),
        prompt(s),
    ),
    "plan_append": lambda s, layer: (s.kv.plan_append, layer, two_lists(s)),
    "gather_sequence": lambda s, layer: (s.kv.gather_sequence, layer, s.partial),
    "free_blocks": lambda s, layer: (s.kv.free_blocks, layer, s.partial),
    "num_free_blocks": lambda s, layer: (s.kv.num_free_blocks, layer),
}


@pytest.mark.parametrize("layer", [-1, 2, 99])
@pytest.mark.parametrize("call", CALLS_WITH_LAYER.values(), ids=CALLS_WITH_LAYER)
def test_unknown_layer_is_rejected(device: str, call: Any, layer: int) -> None:
    words = f"layer {layer} of a cache with 2 layers"
    case = RejectedCall(lambda scene: call(scene, layer), BadArgument, words)
    assert_rejected(build_scene(device, AppendPolicy()), case)


@pytest.mark.parametrize("total_len", [-1, 3, 4, 100])
def test_gathering_more_tokens_than_stored_is_rejected(device: str, total_len: int) -> None:
    """A block has room for 4 tokens, with stale ones after the 2 that are stored."""

    def call(scene: Scene) -> Call:
        return scene.kv.gather_sequence, 0, scene.partial, total_len

    case = RejectedCall(call, BadArgument, f"total_len={total_len}, but 2 tokens are stored")
    assert_rejected(build_scene(device, AppendPolicy()), case)


def test_length_to_gather_that_is_no_number_is_rejected(device: str) -> None:
    def call(scene: Scene) -> Call:
        return scene.kv.gather_sequence, 0, [], "all"

    words = r"total_len a whole number or None, not \[\] and 'all'"
    assert_rejected(build_scene(device, AppendPolicy()), RejectedCall(call, BadArgument, words))


BAD_SIZES = {
    "no_layers": ({"num_layers": 0}, "num_layers must be at least 1, not 0"),
    "no_heads": ({"num_heads": 0}, "num_heads must be at least 1, not 0"),
    "no_dims": ({"head_dim": -1}, "head_dim must be at least 1, not -1"),
    "no_tokens": ({"block_size": 0}, "block_size must be at least 1, not 0"),
    "scratch_only": ({"max_blocks_per_layer": 1}, "max_blocks_per_layer=1: at least 2"),
    "no_group": ({"layers_per_group": 0}, "layers_per_group must be at least 1, not 0"),
    "odd_group": ({"layers_per_group": 3}, "2 layers do not divide into groups of 3"),
}


@pytest.mark.parametrize(("sizes", "words"), BAD_SIZES.values(), ids=BAD_SIZES)
def test_invalid_sizes_of_a_cache_are_rejected(
    device: str, sizes: dict[str, int], words: str
) -> None:
    shape: dict[str, Any] = SIZES | sizes
    with pytest.raises(BadArgument, match=words):
        KVBlockManager(device=device, dtype=torch.float32, **shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64], ids=str)
def test_unsupported_dtype_of_a_cache_is_rejected(device: str, dtype: torch.dtype) -> None:
    shape: dict[str, Any] = SIZES
    with pytest.raises(BadArgument, match=f"a cache of {dtype} is not supported"):
        KVBlockManager(device=device, dtype=dtype, **shape)


def test_message_about_an_unknown_device_has_the_reason_of_torch() -> None:
    with pytest.raises(BadArgument, match=r"device 'abacus': torch has no such device: .*abacus"):
        validate_device("abacus")


def test_rows_of_padding_are_not_the_same_list(device: str) -> None:
    scene = build_scene(device, AppendPolicy())
    lists = [None, None, scene.partial, scene.full, scene.partial]
    words = "row 4 is the same list object as row 2"
    assert_rejected(scene, RejectedCall(lambda each: each.append(lists), BadArgument, words))
