"""Cost in counts, not in seconds: linear in the batch, blind to everything else.

Steps are bytecodes plus C functions entered. What a C function does with a list is not in
that count; it is watched by lists and numbers that count or forbid being looked at.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from roseinfer import AppendPolicy, KVBlockManager
from roseinfer.kv.pool import BlockPool
from tests.kv.recorded import count_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MILLION = 1_000_000
BLOCK_SIZE = 4


def small(device: str, max_blocks: int, policy: AppendPolicy | None = None) -> KVBlockManager:
    """Next to no data, so that metadata is all there is."""
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


class Watched(list[Any]):
    """A list that counts the items looked at."""

    looked_at = 0

    def __getitem__(self, index: Any) -> Any:
        self.looked_at += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        self.looked_at += len(self)
        return super().__iter__()

    def __contains__(self, item: object) -> bool:
        self.looked_at += len(self)
        return super().__contains__(item)

    def count(self, value: Any) -> int:
        self.looked_at += len(self)
        return super().count(value)

    def index(self, *args: Any) -> int:
        self.looked_at += len(self)
        return super().index(*args)

    def pop(self, *args: Any) -> Any:
        """Taking from anywhere but the end moves all that follow."""
        self.looked_at += 1 if not args or args[0] in (-1, len(self) - 1) else len(self)
        return super().pop(*args)


def measure(pool: BlockPool, call: Callable[[], object]) -> tuple[int, int]:
    """Steps of a call, and items of the pool's lists that it looked at."""
    lists = [Watched(pool.infos), Watched(pool.refcounts), Watched(pool._recycled)]
    pool.infos, pool.refcounts, pool._recycled = lists
    steps = count_steps(call)
    return steps, sum(each.looked_at for each in lists)


def take_all(pool: BlockPool) -> list[int]:
    """Every block of the pool, as the ids a caller would hold."""
    return [pool.first_id + pool.take(start=i, length=0).block_index for i in range(pool.num_free)]


def test_building_a_pool_takes_the_same_steps_and_bytes_whatever_its_size() -> None:
    def build(size: int) -> tuple[int, int]:
        steps = count_steps(lambda: BlockPool(layer=0, first_id=0, size=size, block_size=16))
        tracemalloc.start()
        pool = BlockPool(layer=0, first_id=0, size=size, block_size=16)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert pool.num_free == size - 1
        return steps, taken

    for _ in range(40):  # Python makes room for attributes by what it has seen of a class
        build(10)
    assert build(10_000) == build(MILLION)


def test_a_cache_of_a_million_blocks_is_built_in_under_two_seconds(device: str) -> None:
    torch.empty(1, device=device)  # a GPU's context is not the cache's cost
    begin = time.perf_counter()
    kv = small(device, MILLION)
    seconds = time.perf_counter() - begin
    assert kv.num_free_blocks(0) == MILLION - 1
    assert seconds < 2


def cost_of_taking_one(in_use: int) -> tuple[int, int]:
    pool = BlockPool(layer=0, first_id=0, size=MILLION, block_size=16)
    for _ in range(in_use):
        pool.take(start=0, length=0)
    return measure(pool, lambda: pool.take(start=0, length=0))


def test_a_million_blocks_in_use_take_at_most_200_bytes_each() -> None:
    """Counting the ids in the callers' lists as well."""
    assert cost_of_taking_one(1000) == cost_of_taking_one(10)  # or the next line takes for ever
    pool = BlockPool(layer=0, first_id=MILLION, size=MILLION, block_size=16)
    tracemalloc.start()
    ids = take_all(pool)
    taken, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.num_free == 0
    assert len(set(ids)) == MILLION - 1
    assert taken / len(ids) <= 200
    assert peak / len(ids) <= 220


class Untouchable(int):
    """An id in the middle of a list: an append has no business looking at it."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise AssertionError(f"looked at id {int.__repr__(self)}, which is not the last")

    __eq__ = __hash__ = __sub__ = __add__ = __rsub__ = __radd__ = __index__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __floordiv__ = __mod__ = __bool__ = _refuse


def append_one(kv: KVBlockManager, lists: list[list[int]]) -> Callable[[], None]:
    key = torch.ones(len(lists), 1, 1, dtype=kv.dtype, device=kv.device)
    return lambda: kv.append_token_batch(0, lists, key, key)


def measure_long_list(device: str, blocks_before: int, last_length: int, holders: int) -> int:
    """Steps of an append to a list of ``blocks_before`` ids and one more block."""
    kv = small(device, 64)
    last: list[int] = []
    kv.plan_append(0, [last], [last_length])
    for _ in range(holders - 1):
        kv.incref_blocks(last)
    lists = [[Untouchable(7)] * blocks_before + last]
    return count_steps(append_one(kv, lists))


@pytest.mark.parametrize(
    ("last_length", "holders"),
    [(1, 1), (BLOCK_SIZE, 1), (BLOCK_SIZE, 2), (1, 2)],
    ids=["in_place", "rollover", "rollover_shared", "copy_on_write"],
)
def test_an_append_does_not_look_back_along_the_sequence(
    device: str, last_length: int, holders: int
) -> None:
    steps = measure_long_list(device, 0, last_length, holders)
    assert steps > 100
    assert measure_long_list(device, 100_000, last_length, holders) == steps


def test_planning_copies_no_block_list(device: str) -> None:
    """A copy of a long list would show in the memory taken, if not in the steps."""

    def peak(blocks_before: int) -> int:
        kv = small(device, 64)
        last: list[int] = []
        kv.plan_append(0, [last])
        lists = [[Untouchable(7)] * blocks_before + last]
        tracemalloc.start()
        kv.plan_append(0, lists, [1])
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(1_000_000) < peak(0) + 10_000


def measure_used_pool(device: str, used: int, freed: int) -> tuple[int, int]:
    """Steps, and pool items looked at, of a mixed append when many blocks were used before."""
    kv = small(device, 50_000)
    pool = kv._pools[0]
    crowd = [pool.take(start=0, length=BLOCK_SIZE).block_index for _ in range(used)]
    kv.free_blocks(0, crowd[:freed])
    lists: list[list[int]] = [[], [], [], [], []]
    kv.plan_append(0, lists, [1, BLOCK_SIZE, 2, 3, 1])
    kv.incref_blocks(lists[3])
    kv.free_blocks(0, lists.pop())
    return measure(pool, append_one(kv, [*lists, []]))


@pytest.mark.parametrize(
    ("few", "many"),
    [((10, 0), (40_000, 0)), ((20, 20), (40_000, 39_000))],
    ids=["all_in_use", "most_freed"],
)
def test_an_append_does_not_notice_how_many_blocks_were_used(
    device: str, few: tuple[int, int], many: tuple[int, int]
) -> None:
    steps, looked_at = measure_used_pool(device, *few)
    assert looked_at > 5
    assert measure_used_pool(device, *many) == (steps, looked_at)


def measure_batch(device: str, policy: AppendPolicy, batch: int, kind: str) -> int:
    """Steps of one append by ``batch`` sequences that all meet the same thing."""
    kv = small(device, 3 * batch + 2, policy)
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


@pytest.mark.parametrize("kind", ["fresh", "in_place", "uneven", "rollover", "copy_on_write"])
@pytest.mark.parametrize(
    "policy",
    [
        AppendPolicy(triton=False),
        AppendPolicy(triton=False, identity=False),
        AppendPolicy(triton=False, batched_rollover=False, batched_copy_on_write=False),
    ],
    ids=["identity", "gather", "apart"],
)
def test_steps_grow_linearly_up_to_4096_sequences(
    device: str, kind: str, policy: AppendPolicy
) -> None:
    """Exactly: each further sequence costs what the one before it did."""
    steps = {batch: measure_batch(device, policy, batch, kind) for batch in (256, 1024, 4096)}
    per_row = (steps[1024] - steps[256]) / 768
    assert per_row > 10
    assert steps[4096] - steps[1024] == pytest.approx(3072 * per_row, rel=0.01)


def test_quadratic_work_would_be_seen() -> None:
    """The comparison above fails if every row is searched among the rows before it."""

    def quadratic(batch: int) -> Callable[[], None]:
        def work() -> None:
            for row in range(batch):
                for _ in range(row):
                    pass

        return work

    steps = {batch: count_steps(quadratic(batch)) for batch in (64, 256, 1024)}
    per_row = (steps[256] - steps[64]) / 192
    assert steps[1024] - steps[256] > 1.5 * 768 * per_row


def test_a_reader_of_the_whole_list_would_be_seen() -> None:
    watched = Watched(range(1000))
    assert 999 in watched
    assert watched.looked_at == 1000
    with pytest.raises(AssertionError, match="looked at id 7"):
        sum([Untouchable(7)])
    with pytest.raises(AssertionError, match="looked at id 7"):
        7 in [Untouchable(7)]  # noqa: B015
