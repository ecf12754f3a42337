"""Sequences are preempted and resumed, swapped out and in, and wrong ways to do so are found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import pytest

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    KVCacheAdapter,
    Oracle,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.observation import Snapshot
from pytest_roseinfer.capabilities.preemption import Preempt, Resume
from pytest_roseinfer.capabilities.swapping import (
    FinishSwapIn,
    FinishSwapOut,
    Stage,
    SwapIn,
    SwapOut,
    swapped,
)
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.findings.divergence import picture
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.metamorphic import check_every_option
from tests.capabilities.caches.broken_swap_caches import (
    BROKEN,
    BringsBackToTheOldBlocks,
    CopiesWhatIsFree,
    GivesBackTwice,
    ReusesBlocksBeforeTheCopy,
)
from tests.capabilities.caches.swap_cache import EagerSwapCache, SwapCache, SwapTextCache
from tests.histories.drawn import drawn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(num_layers=2, block_size=2, num_blocks=4)


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", [SwapCache, EagerSwapCache, SwapTextCache])
def test_a_cache_that_swaps_right_passes(cache: type[KVCacheAdapter]) -> None:
    settings.set_current(settings.Settings(examples=15, steps=16, seed=1))
    tests = conformance(cache)()
    tests.test_histories()
    assert not TargetVerdict(coverage.current().of(cache)).problems(require_paths=True)
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    if cache is not SwapTextCache:
        tests.test_fork_then_append_equals_copy_then_append()


@pytest.mark.many_alike
@pytest.mark.parametrize("broken", BROKEN, ids=lambda cache: cache.__name__)
def test_one_that_swaps_wrong_is_found(broken: type[KVCacheAdapter]) -> None:
    with pytest.raises(Divergence):
        drawn(broken, 300, 2, partial(run_history, broken))


@pytest.mark.parametrize(
    "broken",
    [ReusesBlocksBeforeTheCopy, CopiesWhatIsFree, BringsBackToTheOldBlocks, GivesBackTwice],
    ids=lambda cache: cache.__name__,
)
def test_blocks_are_needed_by_others_before_a_sequence_is_back(
    broken: type[KVCacheAdapter],
) -> None:
    """What is read back tells, where a cache shows neither its books nor its storage."""
    hidden = {name: getattr(KVCacheAdapter, name) for name in ("table", "ledger", "arena")}
    shows_nothing = type("ShowsNothing", (broken,), hidden)
    with pytest.raises(Divergence, match="expected"):
        drawn(shows_nothing, 300, 1, partial(run_history, shows_nothing))


def test_others_take_the_blocks_write_and_cancel_between_any_two_steps() -> None:
    met: Counter[str] = Counter()

    def note(history: History) -> None:
        oracle = Oracle.of(SwapCache, history.spec)
        for step in history.operations:
            absent, fits = oracle.absent, step.fits(oracle)
            for how in {each.description for each in absent.values()}:
                met[f"{how}, and no block left"] += oracle.pages_free() == 0
                met[f"{how}, and others write"] += bool(step.rows() and fits)
            if isinstance(step, Free) and step.seq in absent:
                met[f"freed while {absent[step.seq].description}"] += 1
            elif isinstance(step, (Resume, SwapIn)):
                met["room to come back" if fits else "no room to come back"] += 1
            elif isinstance(step, (Preempt, FinishSwapOut)):
                shared = any(page.holders > 1 for page in oracle.sequences[step.seq])
                met[f"{type(step).__name__} with shared blocks"] += shared
            elif isinstance(step, FinishSwapIn):
                met["back"] += 1
            step.apply(oracle)

    drawn(SwapCache, 120, 1, note)
    assert min(met.values()) >= 1, met
    assert len(met) == 4 * 3 + 2 + 2 + 1, met


OUT, BACK = (SwapOut(0), FinishSwapOut(0)), (SwapIn(0), FinishSwapIn(0))


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((Prefill(0, 3), *OUT, Prefill(1, 8), Free(1), *BACK, Append((0,))), id="all"),
        pytest.param((Prefill(0, 3), Fork(0, 1), *OUT, Append((1,)), *BACK, Free(1)), id="fork"),
        pytest.param((Prefill(0, 3), *OUT, Prefill(1, 8), SwapIn(0), Free(0)), id="no room"),
        pytest.param((Prefill(0, 3), Fork(0, 1), Truncate(0, 1), *OUT, *BACK), id="cut"),
        pytest.param((Prefill(0, 3), SwapOut(0), Append((1,)), Free(0), Prefill(0, 6)), id="S9"),
        pytest.param((Prefill(0, 3), *OUT, SwapIn(0), Free(0), Prefill(0, 8)), id="S9 back"),
        pytest.param((Prefill(0, 3), Preempt(0), Prefill(1, 8), Free(1), Resume(0, 3)), id="again"),
        pytest.param((Prefill(0, 7), Preempt(0), Prefill(1, 4), Resume(0, 7)), id="no room again"),
        pytest.param((Prefill(0, 3), Preempt(0), Free(0), Prefill(0, 8)), id="freed"),
    ],
)
@pytest.mark.parametrize("cache", [SwapCache, EagerSwapCache])
def test_steps_in_between(cache: type[KVCacheAdapter], steps: tuple[Operation, ...]) -> None:
    run_history(cache, History(SPEC, steps))


def test_what_a_sequence_says_is_the_same_when_it_is_resumed() -> None:
    steps = (Prefill(0, 3), Preempt(0), Prefill(1, 4), Resume(0, 3), Append((0, 1)))
    for texts in (((0, 0),), ((0, 0), (0, 2))):
        run_history(SwapTextCache, History(replace(SPEC, num_blocks=6), steps, texts=texts))


class TrimsByOption(SwapCache):
    option_choices: ClassVar[Mapping[str, Sequence[bool]]] = {"trims": (True, False)}
    truncation = SwapCache.truncation.but(errors=(ValueError,))

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:  # noqa: ARG003
        return bool(spec.options["trims"])


def test_a_sequence_that_only_some_caches_cut_is_not_resumed_as_the_others_have_it() -> None:
    steps = (Prefill(0, 5), Truncate(0, 3), Preempt(0), Resume(0, 3), Append((0, 1)))
    check_every_option(TrimsByOption, History(replace(SPEC, options={"trims": True}), steps))


def test_a_picture_says_what_is_away() -> None:
    oracle = forked_oracle()
    for step in (*OUT, SwapIn(0), Preempt(1)):
        step.apply(oracle)
    shown = picture(None, 1, oracle, Snapshot())
    assert "sequence 0: [0.0 0.1] [0.2]\n  sequence 0 is being swapped in" in shown
    assert "sequence 1 is preempted" in shown


@pytest.mark.parametrize("last", [Append((1,)), SwapIn(0)])
def test_blocks_used_while_away_are_counted(last: Operation) -> None:
    """One block comes to sequence 1 while 0 is away, unless 0 is back first."""
    counted = run_history(SwapCache, History(SPEC, (Prefill(0, 2), *OUT, last, Append((1,)))))
    assert counted["block_used_while_absent"] == isinstance(last, Append)


def forked_oracle(*, swap_out_holds: bool = True) -> Oracle:
    """Sequence 0 has three tokens, and sequence 1 is a fork of it with one more."""
    oracle = Oracle(block_size=2, capacity=6)
    swapped(oracle).holds_blocks = swap_out_holds
    for step in (Prefill(0, 3), Fork(0, 1), Append((1,))):
        assert step.apply(oracle)
    return oracle


@pytest.mark.parametrize("holds", [True, False])
def test_a_swapped_sequence_gives_up_its_pages_once(holds: bool) -> None:
    oracle = forked_oracle(swap_out_holds=holds)
    tokens = oracle.tokens(0)
    seen = []
    for step in (*OUT, *BACK):
        assert step.apply(oracle)
        seen.append((oracle.pages_free(), oracle.sequences[1][0].holders, 0 in oracle.readable))
    assert seen == [
        (3, 2, True) if holds else (4, 1, False),
        (4, 1, False),
        (2, 1, False),
        (2, 1, True),
    ]
    assert oracle.tokens(0) == tokens
    assert not oracle.named - {0, 1}


@pytest.mark.parametrize("steps", [(Preempt(0),), *(OUT[:at] for at in (1, 2)), (*OUT, SwapIn(0))])
def test_a_sequence_that_is_freed_while_it_is_away_has_nothing(
    steps: tuple[Operation, ...],
) -> None:
    oracle = forked_oracle()
    for step in (*steps, Free(0)):
        assert step.apply(oracle)
    assert oracle.named == {1}
    assert oracle.pages_free() == 4
    assert swapped(oracle).blocks(2) == 0


def test_a_sequence_on_its_way_back_is_not_written_yet() -> None:
    oracle = forked_oracle()
    for step in (*OUT, SwapIn(0)):
        step.apply(oracle)
    assert (oracle.unwritten(0), oracle.unwritten(1)) == (3, 0)
    assert swapped(oracle).at(Stage.SWAPPING_IN) == [0]


def test_steps_are_said_and_read_from_json() -> None:
    steps = (*OUT, *BACK, Preempt(0), Resume(0, 2, "strided"))
    assert [step.describe() for step in steps] == [
        "begin to swap sequence 0 out",
        "finish swapping sequence 0 out",
        "begin to swap sequence 0 in",
        "finish swapping sequence 0 in",
        "preempt sequence 0",
        "resume sequence 0, with its 2 tokens (inputs strided)",
    ]
    history = History(SPEC, steps)
    assert History.from_json(history.to_json()) == history
