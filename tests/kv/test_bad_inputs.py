"""Invalid tensors, lists and numbers are refused without side effects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, KVBlockManager
from tests.kv.scene import POLICIES, Call, Refused, Scene, assert_refused, set_up
from tests.kv.twins import SIZES

if TYPE_CHECKING:
    from collections.abc import Callable

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def two(scene: Scene) -> list[list[int]]:
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


@every_policy
@pytest.mark.parametrize("shape", BATCH_SHAPES.values(), ids=BATCH_SHAPES)
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_batch_of_another_shape(
    device: str, policy: AppendPolicy, shape: tuple[int, ...], name: str
) -> None:
    def call(scene: Scene) -> Call:
        given: dict[str, Any] = {name: scene.kv.keys.new_zeros(shape)}
        return scene.append(two(scene), **given)

    words = rf"key and value must be \[2, 3, 5\]; they are .*\[{', '.join(map(str, shape))}\]"
    assert_refused(set_up(device, policy), Refused(call, BadArgument, words))


@pytest.mark.parametrize("shape", [(5,), (3, 6), (4, 5), (1, 3, 5)])
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_token_of_another_shape(device: str, shape: tuple[int, ...], name: str) -> None:
    def call(scene: Scene) -> Call:
        given: dict[str, Any] = {name: scene.kv.keys.new_zeros(shape)}
        return scene.append_one(scene.partial, **given)

    case = Refused(call, BadArgument, r"key and value must be \[3, 5\]; they are ")
    assert_refused(set_up(device, AppendPolicy()), case)


@pytest.mark.parametrize(
    "shape", [(3, 4, 5), (2, 3, 4, 5), (1, 4, 4, 5), (1, 3, 4, 6), (1, 4, 3, 5), (1, 3, 4, 5, 1)]
)
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_prompt_of_another_shape(device: str, shape: tuple[int, ...], name: str) -> None:
    def call(scene: Scene) -> Call:
        good = scene.kv.keys.new_zeros(1, 3, 4, 5)
        pair = {"key": good, "value": good} | {name: scene.kv.keys.new_zeros(shape)}
        return scene.kv.register_prefill_layer, 0, pair["key"], pair["value"]

    case = Refused(call, BadArgument, "key and value must be .*; they are ")
    assert_refused(set_up(device, AppendPolicy()), case)


def test_keys_and_values_of_prompts_of_different_length(device: str) -> None:
    def call(scene: Scene) -> Call:
        key, value = scene.kv.keys.new_zeros(1, 3, 4, 5), scene.kv.keys.new_zeros(1, 3, 6, 5)
        return scene.kv.register_prefill_layer, 0, key, value

    case = Refused(call, BadArgument, r"\[1, 3, 4, 5\] and \[1, 3, 6, 5\]")
    assert_refused(set_up(device, AppendPolicy()), case)


@every_policy
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("name", ["key", "value"])
def test_numbers_that_are_no_floats(
    device: str, policy: AppendPolicy, dtype: torch.dtype, name: str
) -> None:
    def call(scene: Scene) -> Call:
        given: dict[str, Any] = {name: scene.tokens(2).to(dtype)}
        return scene.append(two(scene), **given)

    case = Refused(call, BadArgument, f"key and value must be floats; they are .*{dtype}")
    assert_refused(set_up(device, policy), case)


CALLS: dict[str, Callable[[Scene, torch.Tensor, torch.Tensor], Any]] = {
    "append_token": lambda s, k, v: s.append_one(s.partial, k[0], v[0]),
    "append_token_batch": lambda s, k, v: s.append(two(s), k, v),
    "register_prefill_layer": lambda s, k, v: (
        s.kv.register_prefill_layer,
        0,
        k[None].transpose(1, 2),
        v[None].transpose(1, 2),
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_tensor_on_another_device(device: str, call: Any, name: str) -> None:
    def moved(scene: Scene) -> Any:
        pair = {"key": scene.tokens(2), "value": scene.tokens(2)}
        pair[name] = pair[name].to(scene.elsewhere)
        return call(scene, pair["key"], pair["value"])

    scene = set_up(device, AppendPolicy())
    on = {"key": str(scene.kv.device), "value": str(scene.kv.device), name: scene.elsewhere}
    words = f"the cache is on {scene.kv.device}; key is on {on['key']}, value on {on['value']}"
    assert_refused(scene, Refused(moved, BadArgument, words))


def test_a_write_of_a_tensor_on_another_device(device: str) -> None:
    scene = set_up(device, AppendPolicy())
    plan = scene.kv.plan_append(0, [scene.partial])

    def call(scene: Scene) -> Call:
        return scene.kv.write, plan, 0, scene.tokens(1), scene.tokens(1).to(scene.elsewhere)

    words = f"the cache is on {scene.kv.device}.*value on {scene.elsewhere}"
    assert_refused(scene, Refused(call, BadArgument, words))


@every_policy
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("wrong", [(), (1,), 1, "1"], ids=repr)
def test_a_block_list_that_is_no_list(
    device: str, policy: AppendPolicy, row: int, wrong: object
) -> None:
    """A list of another type could not be changed in place; the error names the row."""

    def call(scene: Scene) -> Call:
        lists: list[object] = [scene.full]
        lists.insert(row, wrong)
        return scene.append(lists)

    case = Refused(call, BadArgument, f"row {row}: a block list must be a list, not ")
    assert_refused(set_up(device, policy), case)


@pytest.mark.parametrize("wrong", [(), (1,), None], ids=repr)
def test_a_token_for_what_is_no_list(device: str, wrong: object) -> None:
    case = Refused(
        lambda scene: scene.append_one(wrong), BadArgument, "a block list must be a list, not "
    )
    assert_refused(set_up(device, AppendPolicy()), case)


def prompt(scene: Scene) -> torch.Tensor:
    return scene.kv.keys.new_zeros(1, 3, 4, 5)


CALLS_WITH_LAYER: dict[str, Callable[[Scene, int], Any]] = {
    "append_token": lambda s, layer: s.append_one(s.partial, layer=layer),
    "append_token_batch": lambda s, layer: s.append(two(s), layer=layer),
    "register_prefill_layer": lambda s, layer: (
        s.kv.register_prefill_layer,
        layer,
        prompt(s),
        prompt(s),
    ),
    "plan_append": lambda s, layer: (s.kv.plan_append, layer, two(s)),
    "gather_sequence": lambda s, layer: (s.kv.gather_sequence, layer, s.partial),
    "free_blocks": lambda s, layer: (s.kv.free_blocks, layer, s.partial),
    "num_free_blocks": lambda s, layer: (s.kv.num_free_blocks, layer),
}


@pytest.mark.parametrize("layer", [-1, 2, 99])
@pytest.mark.parametrize("call", CALLS_WITH_LAYER.values(), ids=CALLS_WITH_LAYER)
def test_a_layer_that_does_not_exist(device: str, call: Any, layer: int) -> None:
    words = f"layer {layer} of a cache with 2 layers"
    case = Refused(lambda scene: call(scene, layer), BadArgument, words)
    assert_refused(set_up(device, AppendPolicy()), case)


@pytest.mark.parametrize("total_len", [-1, 3, 4, 100])
def test_reading_more_than_is_stored(device: str, total_len: int) -> None:
    """A block has room for 4 tokens, with stale ones after the 2 that are stored."""

    def call(scene: Scene) -> Call:
        return scene.kv.gather_sequence, 0, scene.partial, total_len

    case = Refused(call, BadArgument, f"total_len={total_len}, but 2 tokens are stored")
    assert_refused(set_up(device, AppendPolicy()), case)


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
def test_a_cache_that_cannot_be(device: str, sizes: dict[str, int], words: str) -> None:
    shape: dict[str, Any] = SIZES | sizes
    with pytest.raises(BadArgument, match=words):
        KVBlockManager(device=device, dtype=torch.float32, **shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64], ids=str)
def test_a_cache_of_another_dtype(device: str, dtype: torch.dtype) -> None:
    shape: dict[str, Any] = SIZES
    with pytest.raises(BadArgument, match=f"a cache of {dtype} is not supported"):
        KVBlockManager(device=device, dtype=dtype, **shape)
