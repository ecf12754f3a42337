"""Cost of appends in steps, not seconds: linear in the batch, independent of all else.

Steps are bytecodes plus C functions entered. Work that a C function does on a list is not in that
count; it is measured by lists and numbers that count or forbid accesses.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from roseinfer import AppendPolicy, KVBlockManager
from roseinfer.kv.pool import BlockPool
from tests.kv.recording import count_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MILLION = 1_000_000
BLOCK_SIZE = 4


def build_small(device: str, max_blocks: int, policy: AppendPolicy | None = None) -> KVBlockManager:
    """Build a cache with next to no data, so that metadata dominates."""
    return KVBlockManager(
        num_layers=1,
        num_heads=1,
        head_dim=1,
        block_size=BLOCK_SIZE,
        max_blocks_per_layer=max_blocks,
        device=device,
        dtype=torch.float16,
        policy=policy or AppendPolicy(triton=False),
    )


class CountingList(list[Any]):
    """List that counts the items accessed."""

    num_accesses = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_accesses += (
            len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        )
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        self.num_accesses += len(self)
        return super().__iter__()

    def __contains__(self, item: object) -> bool:
        self.num_accesses += len(self)
        return super().__contains__(item)

    def count(self, value: Any) -> int:
        self.num_accesses += len(self)
        return super().count(value)

    def index(self, *args: Any) -> int:
        self.num_accesses += len(self)
        return super().index(*args)

    def pop(self, *args: Any) -> Any:
        """Pop an item, counting all that follow it, which are moved."""
        self.num_accesses += 1 if not args or args[0] in (-1, len(self) - 1) else len(self)
        return super().pop(*args)


def measure(pool: BlockPool, call: Callable[[], object]) -> tuple[int, int]:
    """Return the steps of a call, and the items of the pool's lists that it accessed."""
    lists = [
        CountingList(pool.infos),
        CountingList(pool.refcounts),
        CountingList(pool._freed_indices),
    ]
    pool.infos, pool.refcounts, pool._freed_indices = lists
    steps = count_steps(call)
    return steps, sum(each.num_accesses for each in lists)


def allocate_all(pool: BlockPool) -> list[int]:
    """Allocate all blocks of the pool; return their ids."""
    return [
        pool.first_id + pool.allocate(start=i, length=0).block_index for i in range(pool.num_free)
    ]


def test_pool_construction_cost_is_independent_of_its_size() -> None:
    def build(size: int) -> tuple[int, int]:
        steps = count_steps(lambda: BlockPool(layer=0, first_id=0, size=size, block_size=16))
        tracemalloc.start()
        pool = BlockPool(layer=0, first_id=0, size=size, block_size=16)
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert pool.num_free == size - 1
        return steps, num_bytes

    for _ in range(40):  # Python sizes attribute storage by earlier instances of a class
        build(10)
    assert build(10_000) == build(MILLION)


def test_cache_of_a_million_blocks_is_built_within_two_seconds(device: str) -> None:
    torch.empty(1, device=device)  # so that the CUDA context is not counted
    begin = time.perf_counter()
    kv = build_small(device, MILLION)
    seconds = time.perf_counter() - begin
    assert kv.num_free_blocks(0) == MILLION - 1
    assert seconds < 2


def allocation_cost(in_use: int) -> tuple[int, int]:
    pool = BlockPool(layer=0, first_id=0, size=MILLION, block_size=16)
    for _ in range(in_use):
        pool.allocate(start=0, length=0)
    return measure(pool, lambda: pool.allocate(start=0, length=0))


@pytest.mark.slow
def test_used_block_takes_at_most_200_bytes() -> None:
    """The limit includes the ids in the callers' lists."""
    # If this failed, the next line would take far too long.
    assert allocation_cost(1000) == allocation_cost(10)
    pool = BlockPool(layer=0, first_id=MILLION, size=MILLION, block_size=16)
    tracemalloc.start()
    ids = allocate_all(pool)
    num_bytes, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.num_free == 0
    assert len(set(ids)) == MILLION - 1
    assert num_bytes / len(ids) <= 200
    assert peak / len(ids) <= 220


class UnreadableId(int):
    """Id in the middle of a list, which an append must not read."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise AssertionError(f"read id {int.__repr__(self)}, which is not the last")

    __eq__ = __hash__ = __sub__ = __add__ = __rsub__ = __radd__ = __index__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __floordiv__ = __mod__ = __bool__ = _refuse


def append_one(kv: KVBlockManager, lists: list[list[int]]) -> Callable[[], None]:
    key = torch.ones(len(lists), 1, 1, dtype=kv.dtype, device=kv.device)
    return lambda: kv.append_token_batch(0, lists, key, key)


def measure_long_list(device: str, blocks_before: int, last_length: int, holders: int) -> int:
    """Return the steps of an append to a list of ``blocks_before`` ids and one more block."""
    kv = build_small(device, 64)
    last: list[int] = []
    kv.plan_append(0, [last], [last_length])
    for _ in range(holders - 1):
        kv.incref_blocks(last)
    lists = [[UnreadableId(7)] * blocks_before + last]
    return count_steps(append_one(kv, lists))


@pytest.mark.parametrize(
    ("last_length", "holders"),
    [(1, 1), (BLOCK_SIZE, 1), (BLOCK_SIZE, 2), (1, 2)],
    ids=["in_place", "rollover", "rollover_shared", "copy_on_write"],
)
def test_append_reads_only_the_last_block_id(device: str, last_length: int, holders: int) -> None:
    steps = measure_long_list(device, 0, last_length, holders)
    assert steps > 100
    assert measure_long_list(device, 100_000, last_length, holders) == steps


def test_planning_copies_no_block_list(device: str) -> None:
    """A copy of a long list would show in allocated memory, if not in steps."""

    def peak(blocks_before: int) -> int:
        kv = build_small(device, 64)
        last: list[int] = []
        kv.plan_append(0, [last])
        lists = [[UnreadableId(7)] * blocks_before + last]
        tracemalloc.start()
        kv.plan_append(0, lists, [1])
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak_bytes

    assert peak(1_000_000) < peak(0) + 10_000


def measure_used_pool(device: str, used: int, freed: int) -> tuple[int, int]:
    """Return steps and pool items accessed of a mixed append to a much-used pool."""
    kv = build_small(device, 50_000)
    pool = kv._pools[0]
    occupied = [pool.allocate(start=0, length=BLOCK_SIZE).block_index for _ in range(used)]
    kv.free_blocks(0, occupied[:freed])
    lists: list[list[int]] = [[], [], [], [], []]
    kv.plan_append(0, lists, [1, BLOCK_SIZE, 2, 3, 1])
    kv.incref_blocks(lists[3])
    kv.free_blocks(0, lists.pop())
    return measure(pool, append_one(kv, [*lists, []]))


@pytest.mark.parametrize(
    ("few", "many"),
    [((10, 0), (40_000, 0)), ((20, 20), (40_000, 39_000))],
    ids=["all_in_use", "max_freed"],
)
def test_append_cost_is_independent_of_used_blocks(
    device: str, few: tuple[int, int], many: tuple[int, int]
) -> None:
    steps, num_accesses = measure_used_pool(device, *few)
    assert num_accesses > 5
    assert measure_used_pool(device, *many) == (steps, num_accesses)


def measure_batch(device: str, policy: AppendPolicy, batch: int, kind: str) -> int:
    """Return the steps of one append by ``batch`` sequences of the same condition."""
    kv = build_small(device, 3 * batch + 2, policy)
    lists: list[list[int]] = [[] for _ in range(batch)]
    starts = {"in_place": 1, "uneven": 1, "rollover": BLOCK_SIZE, "copy_on_write": 2}
    if kind != "fresh":
        counts = [starts[kind]] * batch
        if kind == "uneven":
            counts[0] = 2
        kv.plan_append(0, lists, counts)
    if kind == "copy_on_write":
        for ids in lists:
            kv.incref_blocks(ids)
    append = append_one(kv, lists)
    return count_steps(append)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("kind", ["fresh", "in_place", "uneven", "rollover", "copy_on_write"])
@pytest.mark.parametrize(
    "policy",
    [
        AppendPolicy(triton=False),
        AppendPolicy(triton=False, identity=False),
        AppendPolicy(triton=False, batched_rollover=False, batched_copy_on_write=False),
    ],
    ids=["identity", "gather", "separate"],
)
def test_steps_grow_linearly_up_to_4096_sequences(
    device: str, kind: str, policy: AppendPolicy
) -> None:
    """Linear exactly: each further sequence adds the same cost."""
    steps = {batch: measure_batch(device, policy, batch, kind) for batch in (256, 1024, 4096)}
    per_row = (steps[1024] - steps[256]) / 768
    assert per_row > 10
    assert steps[4096] - steps[1024] == pytest.approx(3072 * per_row, rel=0.01)


def test_step_count_detects_quadratic_work() -> None:
    """The comparison above fails if each row is searched for among the previous rows."""

    def quadratic(batch: int) -> Callable[[], None]:
        def work() -> None:
            for row in range(batch):
                for _ in range(row):
                    pass

        return work

    steps = {batch: count_steps(quadratic(batch)) for batch in (64, 256, 1024)}
    per_row = (steps[256] - steps[64]) / 192
    assert steps[1024] - steps[256] > 1.5 * 768 * per_row


def test_counting_list_detects_a_full_read() -> None:
    counting = CountingList(range(1000))
    assert 999 in counting
    assert counting.num_accesses == 1000
    with pytest.raises(AssertionError, match="read id 7"):
        sum([UnreadableId(7)])
    with pytest.raises(AssertionError, match="read id 7"):
        7 in [UnreadableId(7)]  # noqa: B015
