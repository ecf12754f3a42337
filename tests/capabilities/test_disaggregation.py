"""Disaggregation: prompts are received from a prefill cache, with losses, cancels and retries."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    Oracle,
    RemoteTraits,
    Tolerance,
    WindowTraits,
    run_history,
)
from pytest_roseinfer.adapters.validation import refuse_mistakes
from pytest_roseinfer.capabilities.disaggregation import (
    AbortRemote,
    BeginReceive,
    CancelReceive,
    EndReceiveTransfer,
    FinishReceive,
    MakeRemote,
    RemotePrefill,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.remote_prompts import Remote
from pytest_roseinfer.capabilities.tiers import DONE, FAILED, PART, TWICE
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import HistoryRunner
from tests.capabilities.caches.broken_disaggregated_caches import BROKEN
from tests.capabilities.caches.disaggregated_caches import (
    RIGHT,
    EndingCache,
    PullingCache,
    PushedCache,
)
from tests.capabilities.caches.paged_cache import PagedCache
from tests.histories.drawn_histories import check_drawn_histories
from tests.slow import few_or_many_examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import KVCacheAdapter, Transfer, TransferResult
    from pytest_roseinfer.capabilities.operation import Operation

CONDITIONS = {
    "received_other_block_size",
    "received_other_ranks",
    "received_while_prefilling",
    "received_after_cancel",
    "transfer_lost",
    "write_during_receive",
    "block_reused_after_cancel",
}
REMOTE = MakeRemote(3, 4, 2)
"""A prefill cache with blocks of three tokens, on two ranks."""


def history(*steps: Operation, blocks: int = 6) -> History:
    spec = CacheSpec(num_layers=2, num_heads=2, block_size=2, num_blocks=blocks)
    return History(spec, steps, texts=((0, 0), (0, 0)))


def counts_of(cache: type[KVCacheAdapter], *steps: Operation) -> dict[str, int]:
    return {
        name: n for name, n in run_history(cache, history(*steps)).items() if name in CONDITIONS
    }


def failure_of(cache: type[KVCacheAdapter], *steps: Operation) -> str:
    with pytest.raises(Divergence) as failure:
        run_history(cache, history(*steps))
    return failure.value.summary


RARE = ("CountsAReportTwice", "FreesThePromptAtTheBegin", "KeepsAnAbortedPrompt")
"""Caches whose faults a hundred histories do not show."""


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "cache",
    [pytest.param(each, marks=[pytest.mark.slow] * (each.__name__ in RARE)) for each in BROKEN],
    ids=lambda cache: cache.__name__,
)
def test_cache_that_receives_wrongly_fails(cache: type[KVCacheAdapter]) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(cache, 500, 0, lambda each: run_history(cache, each))


@pytest.mark.parametrize("cache", RIGHT, ids=lambda cache: cache.__name__)
@few_or_many_examples(8, 30)
def test_cache_that_receives_right_passes(cache: type[KVCacheAdapter], examples: int) -> None:
    check_drawn_histories(cache, examples, 1, lambda each: run_history(cache, each))


def test_conditions_are_required() -> None:
    assert set(coverage.Coverage().of(PushedCache).conditions) >= CONDITIONS
    assert CONDITIONS.isdisjoint(coverage.Coverage().of(PagedCache).conditions)

    class AfterPrefill(PushedCache):
        remote = RemoteTraits(while_prefilling=False)

    lacking = CONDITIONS - {*coverage.Coverage().of(AfterPrefill).conditions}
    assert lacking == {
        "received_other_block_size",
        "received_other_ranks",
        "received_while_prefilling",
    }

    class Ends(PushedCache):
        remote = RemoteTraits(keeps_cancelled=False)

    assert "received_after_cancel" not in coverage.Coverage().of(Ends).conditions


@pytest.mark.parametrize("cache", RIGHT)
def test_prompt_is_received(cache: type[KVCacheAdapter]) -> None:
    steps = (RemotePrefill(0, 5), BeginReceive(0, 5), FinishReceive(0), Append((0,)))
    met = dict.fromkeys(("received_other_block_size", "received_other_ranks"), 1)
    assert counts_of(cache, REMOTE, *steps) == met
    assert counts_of(cache, MakeRemote(2, 4), *steps) == {}


@pytest.mark.parametrize("cache", [PushedCache, PullingCache])
def test_receive_begins_before_the_last_chunk(cache: type[KVCacheAdapter]) -> None:
    steps = (RemotePrefill(0, 4), BeginReceive(0, 7), EndReceiveTransfer(), RemotePrefill(0, 3))
    counts = counts_of(cache, REMOTE, *steps, FinishReceive(0))
    assert counts["received_while_prefilling"] == 1


def test_receive_cannot_begin_early_where_a_prompt_must_be_complete() -> None:
    """Shrinking drops chunks of a prompt, too."""
    prefilled = REMOTE, RemotePrefill(0, 4)
    oracle = oracle_after(*prefilled, remote=Remote(2, while_prefilling=False))
    assert not BeginReceive(0, 7).possible(oracle)
    assert BeginReceive(0, 4).possible(oracle)
    assert BeginReceive(0, 7).possible(oracle_after(*prefilled, remote=Remote(2)))


@pytest.mark.parametrize("cache", [PushedCache, PullingCache])
@pytest.mark.parametrize("result", [FAILED, PART])
def test_cancelled_receive_is_retried(cache: type[KVCacheAdapter], result: str) -> None:
    others = (Append((3, 4, 5)), EndReceiveTransfer(), Free(3), Free(4), Free(5))
    counts = counts_of(
        cache,
        *(REMOTE, RemotePrefill(0, 5), BeginReceive(0, 5), EndReceiveTransfer(), Append((1,))),
        *(EndReceiveTransfer(0, result, 1), CancelReceive(0), *others),
        *(BeginReceive(0, 5), EndReceiveTransfer(0, TWICE), FinishReceive(0)),
    )
    names = ("received_after_cancel", "transfer_lost", "write_during_receive")
    assert [counts[name] for name in names] == [1, 1, 1]
    assert counts["block_reused_after_cancel"] > 0


def test_cancelled_receive_ends_its_prompt() -> None:
    first = (RemotePrefill(0, 4), BeginReceive(0, 4), FinishReceive(0), Free(0))
    second = (
        RemotePrefill(2, 4),
        BeginReceive(2, 4),
        EndReceiveTransfer(0, DONE),
        CancelReceive(2),
    )
    again = (RemotePrefill(2, 3), BeginReceive(2, 3), EndReceiveTransfer(0, DONE))
    counts = counts_of(EndingCache, MakeRemote(2, 4), *first, *second, *again, FinishReceive(2))
    assert "received_after_cancel" not in counts
    oracle = oracle_after(*(REMOTE, RemotePrefill(0, 3)), remote=Remote(2, keeps_cancelled=False))
    BeginReceive(0, 3).apply(oracle)
    CancelReceive(0).apply(oracle)
    assert oracle.pages_free() == 9
    assert not oracle.pending_seqs
    assert Append((0,)).possible(oracle)


@pytest.mark.parametrize("cache", RIGHT)
def test_aborted_prompt_leaves_its_name(cache: type[KVCacheAdapter]) -> None:
    steps = (RemotePrefill(0, 4), BeginReceive(0, 4), EndReceiveTransfer(), AbortRemote(0))
    again = (RemotePrefill(0, 3), EndReceiveTransfer(), BeginReceive(0, 3), FinishReceive(0))
    run_history(cache, history(REMOTE, *steps, *again, RemotePrefill(1, 1), AbortRemote(1)))


def test_receive_without_room_is_refused() -> None:
    steps = (RemotePrefill(0, 5), Append((1,)), BeginReceive(0, 5), Free(1), BeginReceive(0, 5))
    runner = HistoryRunner(PushedCache, history(REMOTE, *steps, FinishReceive(0), blocks=3))
    runner.run()
    assert [*runner.refused] == [1 + steps.index(BeginReceive(0, 5)) + 1]


def test_own_prefix_is_not_received() -> None:
    received = []

    class Counts(PullingCache):
        def end_transfer(self, transfer: Transfer, result: TransferResult) -> None:
            received.append(transfer.blocks)
            super().end_transfer(transfer, result)

    steps = [RemotePrefill(seq, 5) for seq in (0, 2)]
    for seq in (0, 2):
        steps += [BeginReceive(seq, 5), FinishReceive(seq)]  # type: ignore[list-item]
    run_history(Counts, history(MakeRemote(2, 6), *steps))
    assert len(received) == 3 + 1


def oracle_after(*steps: Operation, remote: Remote | None = None) -> Oracle:
    oracle = Oracle(2, 9, states={Remote: remote or Remote(2)})
    for step in steps:
        assert step.possible(oracle)
        step.apply(oracle)
    return oracle


def test_prompt_reserves_its_name() -> None:
    oracle = oracle_after(REMOTE, RemotePrefill(0, 3))
    assert oracle.pending_seqs == [0]
    assert not Append((0,)).possible(oracle)
    assert Append((1,)).possible(oracle)
    BeginReceive(0, 4).apply(oracle)
    assert (oracle.pending_seqs, oracle.hidden, oracle.usable) == ([], [0], [])
    assert oracle.pages_free() == 7
    assert not FinishReceive(0).possible(oracle)
    assert not RemotePrefill(0, 2).possible(oracle)
    for step in (RemotePrefill(0, 1), FinishReceive(0)):
        assert step.possible(oracle)
        step.apply(oracle)
    assert (oracle.hidden, oracle.usable) == ([], [0])
    assert not AbortRemote(0).possible(oracle)


def test_retry_has_the_tokens_of_the_prompt() -> None:
    oracle = oracle_after(REMOTE, RemotePrefill(0, 3), BeginReceive(0, 3))
    tokens = oracle.tokens(0)
    CancelReceive(0).apply(oracle)
    assert oracle.pages_free() == 9
    BeginReceive(0, 3).apply(oracle)
    assert oracle.tokens(0) == tokens
    AbortRemote(0).apply(oracle)
    RemotePrefill(0, 3).apply(oracle)
    BeginReceive(0, 3).apply(oracle)
    assert not {*oracle.tokens(0)} & {*tokens}


def test_prompts_fit_the_prefill_cache() -> None:
    oracle = oracle_after(MakeRemote(3, 2), RemotePrefill(0, 4))
    assert RemotePrefill(0, 2).possible(oracle)
    assert not RemotePrefill(0, 3).possible(oracle)
    assert not RemotePrefill(1, 1).possible(oracle)
    assert not MakeRemote(3, 2).possible(oracle)
    assert not RemotePrefill(0, 1).possible(Oracle(2, 9))


class ReturnsNoStatus(PushedCache):
    def poll_receive(self, seq: int) -> Any:
        return self.has_arrived(self.prompts[seq])


class NeverDone(PullingCache):
    def poll_receive(self, seq: int) -> Any:
        super().poll_receive(seq)
        return "failed" if self.prompts[seq].missing == set() else "in flight"


class KeepsTransfers(PushedCache):
    def end_transfer(self, transfer: Transfer, result: TransferResult) -> None:
        pass


class CountsNoBlocks(PushedCache):
    def remote_free_blocks(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        (ReturnsNoStatus, "poll_receive(0) returned False: return one of 'in flight', 'done'"),
        (NeverDone, "poll_receive(0) returned 'failed', and none of its transfers has failed"),
        (KeepsTransfers, "transfers_in_flight() still lists transfer 0, which has ended"),
        (CountsNoBlocks, "remote_free_blocks() returned None: return a number"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_answers_are_named(cache: type[KVCacheAdapter], problem: str) -> None:
    steps = (
        REMOTE,
        RemotePrefill(0, 2),
        BeginReceive(0, 2),
        EndReceiveTransfer(),
        FinishReceive(0),
    )
    assert problem in failure_of(cache, REMOTE, *steps)


def test_finish_names_the_status() -> None:
    class Stays(PushedCache):
        def end_transfer(self, transfer: Transfer, result: TransferResult) -> None:
            super().end_transfer(transfer, result)
            self.done = len(self.pushes) == 0

        def poll_receive(self, seq: int) -> Any:  # noqa: ARG002
            return "in flight"

    steps = (REMOTE, RemotePrefill(0, 2), BeginReceive(0, 2), FinishReceive(0))
    assert failure_of(Stays, *steps) == (
        "all transfers for sequence 0 have arrived, and poll_receive(0) returned 'in flight'"
    )


def test_failure_names_the_prompt() -> None:
    class Overwrites(PushedCache):
        def begin_receive(self, seq: int, num_tokens: int) -> None:
            super().begin_receive(seq, num_tokens)
            for rank in self.prefill_cache.ranks:
                rank[:, 1] = 0

    steps = (REMOTE, RemotePrefill(0, 2), BeginReceive(0, 2))
    assert failure_of(Overwrites, *steps) == (
        "peek_remote(0, 1), K: position 0, head 0: expected text 0, token 0, found zeros"
    )


def test_sequence_being_received_is_misused() -> None:
    class AppendsToIt(PushedCache):
        standard_bad_calls = ("append_to_being_received",)

        def refuse_received(self, seqs: Sequence[int]) -> None:
            pass

    steps = (REMOTE, RemotePrefill(0, 2), BeginReceive(0, 2), EndReceiveTransfer(0, DONE))
    assert "append to a sequence that is being received" in failure_of(AppendsToIt, *steps)


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ({"reset": PushedCache.release}, "cannot be judged with reset yet"),
        ({"windows": WindowTraits(groups=2)}, "cannot be judged with windows yet"),
        ({"tolerance": {"int8": Tolerance(1 / 250)}}, "cannot be judged with tolerance yet"),
        (
            {"remote": RemoteTraits(ranks=(2,))},
            r"remote.ranks is \(2,\): write numbers .* \(1, 2\)",
        ),
        ({"remote": RemoteTraits(block_sizes=(0,))}, r"remote.block_sizes is \(0,\): write"),
    ],
)
def test_declarations_that_cannot_be_judged_are_refused(
    declared: dict[str, Any], problem: str
) -> None:
    base = PushedCache if "windows" in declared else PullingCache
    with pytest.raises(TypeError, match=problem):
        refuse_mistakes(type("Refused", (base,), declared))


def test_methods_need_each_other() -> None:
    half = type("Half", (PagedCache,), {"begin_receive": PushedCache.begin_receive})
    with pytest.raises(TypeError, match="must then define make_remote, remote_prefill"):
        refuse_mistakes(half)
    alone = {name: getattr(PushedCache, name) for name in ("transfers_in_flight", "end_transfer")}
    with pytest.raises(TypeError, match="must then define load_prefix or begin_receive"):
        refuse_mistakes(type("Alone", (PagedCache,), alone))


@pytest.mark.slow
def test_block_sizes_are_drawn_as_multiples() -> None:
    class Multiples(PushedCache):
        remote = RemoteTraits(block_sizes=(2, 3, 4, 6, 8), multiples=True, while_prefilling=False)

    ratios, early = set[bool](), set[bool]()

    def note(each: History) -> None:
        written = Counter[int]()
        for step in each.operations:
            if isinstance(step, MakeRemote):
                sizes = sorted((step.block_size, each.spec.block_size))
                assert sizes[1] % sizes[0] == 0
                ratios.add(step.block_size > each.spec.block_size)
            elif isinstance(step, RemotePrefill):
                written[step.seq] += step.count
            elif isinstance(step, BeginReceive):
                early.add(step.count > written[step.seq])

    check_drawn_histories(Multiples, 50, 1, note)
    assert ratios == {False, True}
    assert early == {False}

    class Smaller(Multiples):
        remote = RemoteTraits(block_sizes=(1, 2, 4), multiples=True, larger_blocks=False)

    ratios.clear()
    check_drawn_histories(Smaller, 50, 1, note)
    assert ratios == {False}
