"""Preemption and swapping: right caches pass, and broken ones fail."""

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
    swap_state,
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
    CopiesFreedBlocks,
    GivesBackTwice,
    ReusesBlocksBeforeTheCopy,
)
from tests.capabilities.caches.keeping_caches import BROKEN as BROKEN_KEEPING
from tests.capabilities.caches.keeping_caches import KeepsUntilNeeded
from tests.capabilities.caches.swap_cache import (
    EagerSwapCache,
    SwapCache,
    SwapTextCache,
    UnsharedSwapCache,
)
from tests.histories.drawn_histories import check_drawn_histories

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(num_layers=2, block_size=2, num_blocks=4)


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize(
    "cache", [SwapCache, EagerSwapCache, SwapTextCache, UnsharedSwapCache, KeepsUntilNeeded]
)
def test_right_swapping_cache_passes(cache: type[KVCacheAdapter]) -> None:
    settings.set_current(settings.Settings(examples=15, steps=16, seed=1))
    tests = conformance(cache)()
    tests.test_histories()
    assert not TargetVerdict(coverage.current().of(cache)).problems(require_paths=True)
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    if cache is not SwapTextCache:
        tests.test_fork_then_append_equals_copy_then_append()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("broken", [*BROKEN, *BROKEN_KEEPING], ids=lambda cache: cache.__name__)
def test_broken_swapping_cache_fails(broken: type[KVCacheAdapter]) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(broken, 300, 2, partial(run_history, broken))


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "broken",
    [ReusesBlocksBeforeTheCopy, CopiesFreedBlocks, BringsBackToTheOldBlocks, GivesBackTwice],
    ids=lambda cache: cache.__name__,
)
def test_reuse_of_blocks_before_swap_in_reveals_wrong_reads(
    broken: type[KVCacheAdapter],
) -> None:
    """The read-back tokens reveal the bug where a cache shows neither its books nor its storage."""
    hidden = {name: getattr(KVCacheAdapter, name) for name in ("table", "ledger", "arena")}
    shows_nothing = type("ShowsNothing", (broken,), hidden)
    with pytest.raises(Divergence, match="expected"):
        check_drawn_histories(shows_nothing, 300, 1, partial(run_history, shows_nothing))


@pytest.mark.slow
def test_histories_interleave_writes_and_frees_with_swapping() -> None:
    conditions: Counter[str] = Counter()

    def count_conditions(history: History) -> None:
        oracle = Oracle.of(SwapCache, history.spec)
        for step in history.operations:
            absent, fits = oracle.absent, step.fits(oracle)
            for description in {each.description for each in absent.values()}:
                conditions[f"{description}, and no block left"] += oracle.pages_free() == 0
                conditions[f"{description}, and others write"] += bool(step.rows() and fits)
            if isinstance(step, Free) and step.seq in absent:
                conditions[f"freed while {absent[step.seq].description}"] += 1
            elif isinstance(step, (Resume, SwapIn)):
                conditions["room to come back" if fits else "no room to come back"] += 1
            elif isinstance(step, (Preempt, FinishSwapOut)):
                shared = any(page.holders > 1 for page in oracle.sequences[step.seq])
                conditions[f"{type(step).__name__} with shared blocks"] += shared
            elif isinstance(step, FinishSwapIn):
                conditions["back"] += 1
            step.apply(oracle)

    check_drawn_histories(SwapCache, 120, 1, count_conditions)
    assert min(conditions.values()) >= 1, conditions
    assert len(conditions) == 4 * 3 + 2 + 2 + 1, conditions


SWAP_OUT, SWAP_IN = (SwapOut(0), FinishSwapOut(0)), (SwapIn(0), FinishSwapIn(0))


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(
            (Prefill(0, 3), *SWAP_OUT, Prefill(1, 8), Free(1), *SWAP_IN, Append((0,))), id="all"
        ),
        pytest.param(
            (Prefill(0, 3), Fork(0, 1), *SWAP_OUT, Append((1,)), *SWAP_IN, Free(1)), id="fork"
        ),
        pytest.param((Prefill(0, 3), *SWAP_OUT, Prefill(1, 8), SwapIn(0), Free(0)), id="no room"),
        pytest.param((Prefill(0, 3), Fork(0, 1), Truncate(0, 1), *SWAP_OUT, *SWAP_IN), id="cut"),
        pytest.param((Prefill(0, 3), SwapOut(0), Append((1,)), Free(0), Prefill(0, 6)), id="S9"),
        pytest.param((Prefill(0, 3), *SWAP_OUT, SwapIn(0), Free(0), Prefill(0, 8)), id="S9 back"),
        pytest.param((Prefill(0, 3), Preempt(0), Prefill(1, 8), Free(1), Resume(0, 3)), id="again"),
        pytest.param((Prefill(0, 7), Preempt(0), Prefill(1, 4), Resume(0, 7)), id="no room again"),
        pytest.param((Prefill(0, 3), Preempt(0), Free(0), Prefill(0, 8)), id="freed"),
    ],
)
@pytest.mark.parametrize("cache", [SwapCache, EagerSwapCache])
def test_steps_between_swap_out_and_swap_in_pass(
    cache: type[KVCacheAdapter], steps: tuple[Operation, ...]
) -> None:
    run_history(cache, History(SPEC, steps))


def test_resumed_sequence_has_the_same_text() -> None:
    steps = (Prefill(0, 3), Preempt(0), Prefill(1, 4), Resume(0, 3), Append((0, 1)))
    for texts in (((0, 0),), ((0, 0), (0, 2))):
        run_history(SwapTextCache, History(replace(SPEC, num_blocks=6), steps, texts=texts))


class TrimsByOption(SwapCache):
    option_choices: ClassVar[Mapping[str, Sequence[bool]]] = {"trims": (True, False)}
    truncation = SwapCache.truncation.but(errors=(ValueError,))

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:  # noqa: ARG003
        return bool(spec.options["trims"])


def test_option_without_truncation_omits_the_resume_of_a_truncated_sequence() -> None:
    steps = (Prefill(0, 5), Truncate(0, 3), Preempt(0), Resume(0, 3), Append((0, 1)))
    check_every_option(TrimsByOption, History(replace(SPEC, options={"trims": True}), steps))


def test_picture_names_absent_sequences() -> None:
    oracle = forked_oracle()
    for step in (*SWAP_OUT, SwapIn(0), Preempt(1)):
        step.apply(oracle)
    drawing = picture(None, 1, oracle, Snapshot())
    assert "sequence 0: [0.0 0.1] [0.2]\n  sequence 0 is being swapped in" in drawing
    assert "sequence 1 is preempted" in drawing


@pytest.mark.parametrize("last", [Append((1,)), SwapIn(0)])
def test_blocks_used_while_a_sequence_is_absent_are_counted(last: Operation) -> None:
    """Sequence 1 gets one block while sequence 0 is absent, unless sequence 0 is back first."""
    counts = run_history(SwapCache, History(SPEC, (Prefill(0, 2), *SWAP_OUT, last, Append((1,)))))
    assert counts["block_used_while_absent"] == isinstance(last, Append)


def forked_oracle(*, swap_out_holds: bool = True) -> Oracle:
    """Return an oracle in which sequence 1 is a fork of sequence 0 with one more token."""
    oracle = Oracle(block_size=2, capacity=6)
    swap_state(oracle).holds_blocks = swap_out_holds
    for step in (Prefill(0, 3), Fork(0, 1), Append((1,))):
        assert step.apply(oracle)
    return oracle


@pytest.mark.parametrize("holds_blocks", [True, False])
def test_swapped_sequence_releases_its_pages_once(holds_blocks: bool) -> None:
    oracle = forked_oracle(swap_out_holds=holds_blocks)
    tokens = oracle.tokens(0)
    states = []
    for step in (*SWAP_OUT, *SWAP_IN):
        assert step.apply(oracle)
        states.append((oracle.pages_free(), oracle.sequences[1][0].holders, 0 in oracle.readable))
    assert states == [
        (3, 2, True) if holds_blocks else (4, 1, False),
        (4, 1, False),
        (2, 1, False),
        (2, 1, True),
    ]
    assert oracle.tokens(0) == tokens
    assert not oracle.named - {0, 1}


@pytest.mark.parametrize(
    "steps", [(Preempt(0),), *(SWAP_OUT[:at] for at in (1, 2)), (*SWAP_OUT, SwapIn(0))]
)
def test_sequence_freed_while_absent_leaves_nothing(
    steps: tuple[Operation, ...],
) -> None:
    oracle = forked_oracle()
    for step in (*steps, Free(0)):
        assert step.apply(oracle)
    assert oracle.named == {1}
    assert oracle.pages_free() == 4
    assert swap_state(oracle).blocks(2) == 0


def test_sequence_during_swap_in_counts_as_unwritten() -> None:
    oracle = forked_oracle()
    for step in (*SWAP_OUT, SwapIn(0)):
        step.apply(oracle)
    assert (oracle.unwritten(0), oracle.unwritten(1)) == (3, 0)
    assert swap_state(oracle).at(Stage.SWAPPING_IN) == [0]


def test_swapping_steps_are_described_and_saved() -> None:
    steps = (*SWAP_OUT, *SWAP_IN, Preempt(0), Resume(0, 2, "strided"))
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


def test_sequence_that_was_not_preempted_is_not_resumed() -> None:
    """A drawn sequence without tokens may be preempted or not, by what its lookup finds."""
    oracle = Oracle(4, 2)
    oracle.append([(0, 1)], [1])
    assert not Resume(0, 0).possible(oracle)
    assert not Resume(1, 0).possible(oracle)
