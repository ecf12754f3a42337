"""Baseline of the search: tests by example, as people write them.

One for every feature of the cache and its kernels, with the usual shapes and the default policy,
as a careful person writes them in an hour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer import AppendPolicy, KVBlockManager, OutOfBlocks
from roseinfer.kernels.triton.append import kv_append_triton
from roseinfer.kernels.triton.clone import kv_clone_triton
from tests.mutants.hunt import Failure, Stop, guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.mutants.tally import Tally

HEADS, DIMS, SIZE = 4, 64, 16


def run(tally: Tally) -> Failure | None:
    """Return the first example that fails."""
    return first_to_fail(EXAMPLES, tally)


def first_to_fail(examples: Iterable[Callable[[], None]], tally: Tally) -> Failure | None:
    torch.manual_seed(0)
    for test in examples:
        tally.check = test.__name__
        try:
            with guarded(tally, 1):
                test()
        except Stop as stop:
            return Failure(test.__name__, stop.message)
    return None


def _manager(blocks: int = 32, *, triton: bool = True, **sizes: int) -> KVBlockManager:
    return KVBlockManager(
        num_layers=sizes.get("layers", 2),
        num_heads=HEADS,
        head_dim=DIMS,
        block_size=SIZE,
        max_blocks_per_layer=blocks,
        device="cpu",
        dtype=torch.float32,
        policy=AppendPolicy(triton=triton),
        layers_per_group=sizes.get("layers_per_group", 1),
    )


def _tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, HEADS, DIMS), torch.randn(count, HEADS, DIMS)


def _expect(kv: KVBlockManager, layer: int, block_ids: list[int], *stored: torch.Tensor) -> None:
    """Compare a sequence with keys and values, ``[tokens, heads, head_dim]``."""
    for want, got in zip(stored, kv.gather_sequence(layer, block_ids), strict=True):
        assert torch.equal(want.transpose(0, 1), got), "a sequence reads back wrong"


def append_one_token_and_read_it() -> None:
    kv, block_ids = _manager(), list[int]()
    key, value = _tokens(1)
    kv.append_token(0, block_ids, key[0], value[0])
    _expect(kv, 0, block_ids, key, value)


def append_batches_until_a_block_is_full() -> None:
    for triton in (True, False):
        kv = _manager(triton=triton)
        lists: list[list[int]] = [[] for _ in range(3)]
        steps = [_tokens(3) for _ in range(SIZE + 2)]
        for key, value in steps:
            kv.append_token_batch(0, lists, key, value)
        for row, block_ids in enumerate(lists):
            keys = torch.stack([key[row] for key, _ in steps])
            _expect(kv, 0, block_ids, keys, torch.stack([value[row] for _, value in steps]))
            assert len(block_ids) == 2


def batches_of_different_lengths() -> None:
    for triton in (True, False):
        kv = _manager(triton=triton)
        first, second = _tokens(5), _tokens(9)
        lists = [_prefill(kv, *first), _prefill(kv, *second)]
        key, value = _tokens(2)
        kv.append_token_batch(0, lists, key, value)
        for row, (keys, values) in enumerate((first, second)):
            expected = (
                torch.cat([keys, key[row : row + 1]]),
                torch.cat([values, value[row : row + 1]]),
            )
            _expect(kv, 0, lists[row], *expected)


def _prefill(kv: KVBlockManager, key: torch.Tensor, value: torch.Tensor) -> list[int]:
    return kv.register_prefill_layer(0, key.transpose(0, 1)[None], value.transpose(0, 1)[None])


def prefill_a_prompt_and_read_it() -> None:
    for count in (3, SIZE, 40):
        kv = _manager()
        key, value = _tokens(count)
        block_ids = _prefill(kv, key, value)
        assert len(block_ids) == -(-count // SIZE)
        _expect(kv, 0, block_ids, key, value)


def fork_and_append_to_both() -> None:
    for triton in (True, False):
        kv = _manager(triton=triton)
        key, value = _tokens(10)
        parent = _prefill(kv, key, value)
        child = list(parent)
        kv.incref_blocks(child)
        assert kv.refcount(parent[0]) == 2
        more_keys, more_values = _tokens(2)
        kv.append_token_batch(0, [parent, child], more_keys, more_values)
        for row, block_ids in enumerate((parent, child)):
            expected = (
                torch.cat([key, more_keys[row][None]]),
                torch.cat([value, more_values[row][None]]),
            )
            _expect(kv, 0, block_ids, *expected)
        assert parent[0] != child[0]


def freed_blocks_return_to_the_pool() -> None:
    kv = _manager()
    before = kv.num_free_blocks(0)
    block_ids = _prefill(kv, *_tokens(40))
    assert kv.num_free_blocks(0) == before - 3
    kv.free_blocks(0, block_ids)
    assert kv.num_free_blocks(0) == before


def a_shared_block_outlives_one_holder() -> None:
    kv = _manager()
    key, value = _tokens(10)
    parent = _prefill(kv, key, value)
    kv.incref_blocks(parent)
    kv.free_blocks(0, parent)
    assert kv.refcount(parent[0]) == 1
    _expect(kv, 0, parent, key, value)


def a_full_pool_refuses_a_sequence() -> None:
    kv = _manager(blocks=3)
    _prefill(kv, *_tokens(2 * SIZE))
    try:
        kv.append_token_batch(0, [[]], *_tokens(1))
    except OutOfBlocks:
        return
    raise AssertionError("a full pool took a new sequence")


def a_group_of_layers_shares_a_plan() -> None:
    kv = _manager(layers_per_group=2)
    lists: list[list[int]] = [[], []]
    plan = kv.plan_append(0, lists, [5, 20])
    written = [_tokens(25) for _ in range(2)]
    for layer, (key, value) in enumerate(written):
        kv.write(plan, layer, key, value)
    for layer, (key, value) in enumerate(written):
        _expect(kv, layer, lists[0], key[:5], value[:5])
        _expect(kv, layer, lists[1], key[5:], value[5:])


def padding_is_not_stored() -> None:
    kv = _manager()
    key, value = _tokens(10)
    block_ids = _prefill(kv, key, value)
    more_keys, more_values = _tokens(2)
    kv.append_token_batch(0, [block_ids, None], more_keys, more_values)
    _expect(kv, 0, block_ids, torch.cat([key, more_keys[:1]]), torch.cat([value, more_values[:1]]))


def half_precision_converts_single() -> None:
    kv = KVBlockManager(1, HEADS, DIMS, SIZE, 8, "cpu", torch.float16)
    key, value = _tokens(1)
    block_ids: list[int] = []
    kv.append_token_batch(0, [block_ids], key, value)
    _expect(kv, 0, block_ids, key.half(), value.half())


def the_append_kernel_writes_its_slots() -> None:
    keys, values = torch.zeros(2, 8, HEADS, SIZE, DIMS)
    key, value = _tokens(3)
    blocks, positions = torch.tensor([5, 1, 2]), torch.tensor([0, 7, 15])
    kv_append_triton(
        k_cache_layer=keys,
        v_cache_layer=values,
        key_new=key,
        value_new=value,
        batch_idx=torch.arange(3),
        block_idx=blocks,
        pos=positions,
    )
    for cache, new in ((keys, key), (values, value)):
        assert torch.equal(cache[blocks, :, positions], new), "the kernel wrote something else"


def the_clone_kernel_copies_a_block() -> None:
    keys, values = torch.randn(2, 2, 8, HEADS, SIZE, DIMS)
    before = keys.clone(), values.clone()
    kv_clone_triton(
        k_cache=keys, v_cache=values, source=torch.tensor([1, 4]), target=torch.tensor([2, 6])
    )
    for cache, old in zip((keys, values), before, strict=True):
        assert torch.equal(cache[:, [2, 6]], old[:, [1, 4]]), "the copy differs"
        assert torch.equal(cache[:, [1, 4]], old[:, [1, 4]]), "the source changed"


EXAMPLES: tuple[Callable[[], None], ...] = (
    append_one_token_and_read_it,
    append_batches_until_a_block_is_full,
    batches_of_different_lengths,
    prefill_a_prompt_and_read_it,
    fork_and_append_to_both,
    freed_blocks_return_to_the_pool,
    a_shared_block_outlives_one_holder,
    a_full_pool_refuses_a_sequence,
    a_group_of_layers_shares_a_plan,
    padding_is_not_stored,
    half_precision_converts_single,
    the_append_kernel_writes_its_slots,
    the_clone_kernel_copies_a_block,
)
