"""What fails is made as small as it goes, within a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    Oracle,
    RequestMix,
    RequestSpec,
    conformance,
    settings,
)
from pytest_roseinfer.adapters.engine import Sampling
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.preemption import Preempt, Resume
from pytest_roseinfer.capabilities.switches import SetOptions
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append, Prefill, Reserve
from pytest_roseinfer.engine_capabilities.capability import change
from pytest_roseinfer.engines.run import MixDivergence
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.run import coverage
from pytest_roseinfer.search import shrink
from pytest_roseinfer.search.shrink import (
    Shrinker,
    keep_valid_steps,
    passes_of_histories,
    passes_of_mixes,
)
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager
from tests.capabilities.caches.broken_caches import LosesTheBlock, SwapsRows
from tests.capabilities.caches.broken_swap_caches import BringsBackOneLayer, KeepsTheOldLength
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.swap_cache import SwapCache
from tests.capabilities.caches.window_cache import WindowCache
from tests.engine_capabilities.engines import broken_engines
from tests.engine_capabilities.engines.toy_engine import ToyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.capabilities.operation import Operation


@pytest.fixture(autouse=True)
def searching() -> Iterator[None]:
    asked, seen = settings.current(), coverage.current()
    settings.set_current(settings.Settings(examples=60, seed=1))
    coverage.set_current(coverage.Coverage())
    try:
        yield
    finally:
        settings.set_current(asked)
        coverage.set_current(seen)


class TakesTwoRows(PagedCache):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if len(seqs) > 2:
            raise RuntimeError("at most two rows")
        super().append(seqs, key, value)


def found(adapter: type[Adapter]) -> Difference:
    """Return how the first test fails that a target's searches make fail."""
    tests = conformance(adapter)()
    name = next(iter(tests.shipped()))
    with pytest.raises(Difference) as caught:
        getattr(tests, name)()
    return caught.value


@pytest.mark.parametrize(
    ("adapter", "steps"),
    [
        (SwapsRows, ["append one token to sequences 0, 1"]),
        (LosesTheBlock, ["append one token to sequence 0", "free sequence 0"]),
        (
            KeepsTheOldLength,
            [
                "append one token to sequence 0",
                "preempt sequence 0",
                "resume sequence 0, with its 1 token",
            ],
        ),
        (
            BringsBackOneLayer,
            [
                "append one token to sequence 0",
                "begin to swap sequence 0 out",
                "finish swapping sequence 0 out",
                "begin to swap sequence 0 in",
                "finish swapping sequence 0 in",
            ],
        ),
    ],
)
def test_a_history_is_the_one_that_one_would_write(
    adapter: type[Adapter], steps: list[str]
) -> None:
    failure = found(adapter)
    assert isinstance(failure, Divergence)
    assert [step.describe() for step in failure.history.operations] == steps


def test_an_error_of_a_step_that_fits_stays_one() -> None:
    """With fewer blocks it would be said that there is no room, which is not the reason."""
    failure = found(TakesTwoRows)
    assert isinstance(failure, Divergence)
    said = "the write raised RuntimeError: at most two rows (3 blocks needed, 3 free)"
    assert failure.what == said
    assert failure.history.spec.num_blocks == 3


@pytest.mark.parametrize(
    ("adapter", "prompts", "new"),
    [
        (broken_engines.ANeighboursTokenLeaksIn, [1, 1], [1, 1]),
        (broken_engines.TakesAnothersPrefix, [2, 2], [1, 1]),
        (broken_engines.LosesTheLastToken, [1], [1]),
        (broken_engines.EndsOthersWithTheCancelled, [1, 1], [2, 1]),
        (broken_engines.RaisesInAStep, [1, 1, 1], [1, 1, 1]),
        (broken_engines.KeepsALease, [1, 1], [1, 2]),
    ],
)
def test_a_mix_has_no_request_and_no_token_too_many(
    adapter: type[EngineAdapter], prompts: list[int], new: list[int]
) -> None:
    failure = found(adapter)
    assert isinstance(failure, MixDivergence)
    asked = failure.mix.requests
    assert [len(each.prompt) for each in asked] == prompts
    assert [each.sampling.max_new_tokens for each in asked] == new


# --------------------------------------------------------------------------- what is tried

STEPS: tuple[Operation, ...] = (Append((0,)), Append((0,)), Fork(0, 1), Free(0), Append((1, 2)))
USUAL, UNUSUAL = (
    {name: values[at] for name, values in GroupedManager.option_choices.items()} for at in (0, -1)
)


def shrunk(
    history: History,
    fails: Callable[[History], bool],
    adapter: type[KVCacheAdapter] = GroupedManager,
) -> History:
    """Make a history smaller whose check fails for another reason than a cache's."""

    def check(case: History) -> None:
        if fails(case):
            raise Difference("it fails", str)

    small = Shrinker(history, Difference("it fails", str), check)
    small.shrink(passes_of_histories(adapter))
    return small.example


def has(*kinds: type[Operation], tokens: int = 0) -> Callable[[History], bool]:
    def fails(case: History) -> bool:
        written = sum(count for step in case.operations for _, count in step.rows())
        return {*kinds} <= {type(step) for step in case.operations} and written >= tokens

    return fails


def oracle_before_the_end(case: History) -> Oracle:
    """Return the oracle before the last step of a history."""
    oracle = Oracle.of(GroupedManager, case.spec, case.texts)
    for step in case.operations[:-1]:
        step.apply(oracle)
    return oracle


def test_no_step_is_left_that_is_not_needed() -> None:
    small = shrunk(History(CacheSpec(options=UNUSUAL), STEPS, finite=False), has(Fork))
    assert small.operations == (Append((0,)), Fork(0, 1))
    assert (small.spec.num_blocks, small.spec.options, small.finite) == (2, USUAL, True)


def test_one_sequence_is_enough_where_two_are_not_needed() -> None:
    steps = (Append((3,)), Fork(3, 1), Truncate(1, 0))
    small = shrunk(History(CacheSpec(options=USUAL), steps), has(Truncate))
    assert small.operations == (Append((0,)), Truncate(0, 0))


def test_a_parent_that_is_freed_goes_with_one_of_its_forks() -> None:
    """The last two who share a block write to it at once."""

    def fails(case: History) -> bool:
        oracle, last = oracle_before_the_end(case), case.operations[-1]
        ends = {seq: id(pages[-1]) for seq, pages in oracle.sequences.items() if pages}
        writing = [ends.get(seq) for seq, _ in last.rows()]
        return len(writing) == 2 == [*ends.values()].count(writing[0] or 0) and len({*writing}) == 1

    steps = (Append((0,)), Fork(0, 1), Fork(0, 2), Free(0), Append((1, 2)))
    small = shrunk(History(CacheSpec(options=USUAL), steps), fails)
    assert small.operations == (Append((0,)), Fork(0, 1), Append((0, 1)))


def test_what_takes_room_goes_with_the_room() -> None:
    """A batch takes all that is left."""

    def fails(case: History) -> bool:
        oracle, last = oracle_before_the_end(case), case.operations[-1]
        if len(last.rows()) < 2 or not last.fits(oracle):
            return False
        last.apply(oracle)
        return not oracle.pages_free()

    steps = (*(Append((seq,)) for seq in (0, 1, 2)), Append((3, 4)))
    small = shrunk(History(CacheSpec(num_blocks=5, options=USUAL), steps), fails)
    assert (small.operations, small.spec.num_blocks) == ((Append((0, 1)),), 2)


def test_what_is_written_in_two_steps_is_written_in_one() -> None:
    small = shrunk(History(CacheSpec(options=USUAL), STEPS), has(Fork, tokens=2))
    assert small.operations == (Prefill(0, 2), Fork(0, 1))


def test_switches_are_set_from_the_beginning() -> None:
    def fails(case: History) -> bool:
        sets = [step.options for step in case.operations if isinstance(step, SetOptions)]
        off = [case.spec.options, *sets][-1]["triton"] is False
        return off and has(Append)(case)

    steps = (Append((0,)), SetOptions(UNUSUAL), Append((0,)))
    small = shrunk(History(CacheSpec(options=USUAL), steps), fails)
    assert (small.operations, small.spec.options) == (STEPS[:1], {**USUAL, "triton": False})


def test_windows_and_layers_are_no_more_than_need_be() -> None:
    spec = CacheSpec(num_layers=3, windows=(9, None, 5))
    small = shrunk(History(spec, STEPS), has(Append), WindowCache)
    assert (small.spec.num_layers, small.spec.windows) == (1, (1,))


def test_what_makes_no_sense_without_a_step_goes_with_it() -> None:
    def sensible(*steps: Operation) -> list[Operation]:
        history = History(CacheSpec(), steps)
        return [*keep_valid_steps(SwapCache, history).operations]

    assert sensible(Fork(0, 1), Append((1,)), Fork(1, 2)) == [Append((1,)), Fork(1, 2)]
    assert sensible(Append((0,)), Prefill(0, 3), Free(1)) == [Append((0,))]
    away: list[Operation] = [Append((0,)), Preempt(0), Resume(0, 5)]
    assert sensible(*away, Append((0,))) == [*away[:2], Resume(0, 1), Append((0,))]
    assert sensible(*away[:2], Append((0,))) == away[:2]


def test_what_is_begun_is_ended() -> None:
    history = History(CacheSpec(), (Reserve((0,), (2,)), Append((0,)), Truncate(0, 1)))
    kept = keep_valid_steps(GroupedManager, history).operations
    assert [type(step).__name__ for step in kept] == ["Reserve", "Fill"]


def test_every_part_of_a_request_is_left_out_that_can_be() -> None:
    sampling = Sampling(9, 3.0, 5, 0.8, 1.5, 3, ignore_eos=True, min_p=0.4, logprobs=True)
    busy = RequestSpec((1, 2, 3), sampling, 3, cancel_after=2, ends_early=True)
    busy = change(busy, stop_spans=((0, 1), (2, 1)))
    mix = RequestMix((busy, busy, busy), block_size=8, cache_tokens=99, options={"batch_size": 3})
    small = Shrinker(mix, Difference("it fails", str), fail_always)
    small.shrink(passes_of_mixes(ToyAdapter))
    (asked,) = small.example.requests
    assert asked == RequestSpec((1,), Sampling())
    assert (small.example.block_size, small.example.cache_tokens) == (1, 2)


def fail_always(_: object) -> None:
    raise Difference("it fails", str)


# ------------------------------------------------------------------------------- its time


def test_it_keeps_to_its_time_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(SwapsRows):
        def write(self, *arguments: object) -> None:
            time.sleep(0.002)
            super().write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 0.0)
    assert "There may be a smaller example: shrinking ended after 0 s." in str(found(Slow))


def test_what_fails_in_another_way_is_no_smaller_example() -> None:
    def check(case: History) -> None:
        if len(case.operations) < len(STEPS):
            raise ZeroDivisionError
        raise Difference("it fails", str)

    small = Shrinker(History(CacheSpec(), STEPS), Difference("it fails", str), check)
    small.shrink(passes_of_histories(GroupedManager))
    assert small.example.size == len(STEPS)


@pytest.mark.parametrize(("large", "small", "left"), [(KeyError, None, 1), (None, KeyError, 5)])
def test_an_error_may_come_of_what_a_smaller_example_shows(
    large: type[Exception] | None, small: type[Exception] | None, left: int
) -> None:
    """What is held is wrong in one, and an error is raised in the other."""

    def failure(case: History) -> Difference:
        failed = Difference("it fails", str)
        raised = large if case.size == len(STEPS) else small
        failed.__cause__ = raised() if raised else None
        return failed

    def check(case: History) -> None:
        raise failure(case)

    history = History(CacheSpec(options=USUAL), STEPS)
    shrunken = Shrinker(history, failure(history), check)
    shrunken.shrink(passes_of_histories(GroupedManager))
    assert shrunken.example.size == left


def test_many_steps_that_are_alike_are_said_in_one_line() -> None:
    steps = [Append((0,))] * 300 + [Free(0)] * 3 + [Append((1,))]
    words = History(CacheSpec(), tuple(steps)).describe({300: "refused: no room"})
    assert words.splitlines()[1:] == [
        "  1.-299. append one token to sequence 0",
        "  300. append one token to sequence 0; refused: no room",
        "  301. free sequence 0",
        "  302. free sequence 0",
        "  303. free sequence 0",
        "  304. append one token to sequence 1",
    ]


def test_making_a_long_history_smaller_ends_in_time_though_many_come_to_the_same() -> None:
    history = History(CacheSpec(), (Append((0,)),) * 300)
    listed: list[History] = []

    def the_same(tried: History) -> Iterator[History]:
        while len(listed) < 1000:
            time.sleep(0.001)
            listed.append(tried)
            yield tried

    def check(_: History) -> None:
        raise ValueError

    shrinking = Shrinker(history, ValueError(), check, ends=time.monotonic() + 0.1)
    shrinking.shrink([the_same])
    assert shrinking.cut_short
    assert 0 < len(listed) < 200
