"""``LLM.stream``: the tokens of ``generate``, one by one."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import EnginePath
from tests.engine.continuations import TEXTS, greedy, one, small_llm, transformers_continuation
from tests.engine.test_random_mixes import assert_no_block_is_lost

if TYPE_CHECKING:
    from roseinfer import LLM


def test_stream_matches_generate(device: str) -> None:
    llm = small_llm(device)
    for text in TEXTS:
        updates = list(llm.stream(text, greedy(ignore_eos=True)))
        assert [update.token_id for update in updates] == transformers_continuation(
            device, text, 16
        )
        joined = "".join(update.text for update in updates)
        assert joined == one(llm, text, greedy(ignore_eos=True)).text
        assert updates[-1].request.finish_reason == "length"


@pytest.mark.parametrize("num_read", [1, 2, 5])
def test_leaving_a_stream_frees_its_blocks(device: str, num_read: int) -> None:
    llm = small_llm(device)
    for at, update in enumerate(llm.stream(TEXTS[0], greedy()), 1):
        request = update.request
        if at == num_read:
            break
    assert request.finish_reason == "cancelled"
    assert request.num_generated == num_read
    assert not llm.engine.has_work
    assert_no_block_is_lost(llm)


def test_unread_stream_submits_nothing(device: str) -> None:
    llm = small_llm(device)
    stream = llm.stream(TEXTS[0], greedy())
    assert not llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work


def test_streams_read_in_turns(device: str) -> None:
    llm = small_llm(device)
    streams = [llm.stream(text, greedy()) for text in TEXTS[:3]]
    tokens_by_stream: list[list[int | None]] = [[] for _ in streams]
    for _ in range(16):
        for tokens, stream in zip(tokens_by_stream, streams, strict=True):
            tokens.append(next(stream).token_id)
    assert [next(stream, None) for stream in streams] == [None] * 3
    assert tokens_by_stream == [transformers_continuation(device, text, 16) for text in TEXTS[:3]]
    assert llm.engine.path_counts[EnginePath.BATCHED] > 10
    assert_no_block_is_lost(llm)


def test_waiting_stream_gets_all_tokens(device: str) -> None:
    """The other stream runs to its end first, and its steps serve this one, too."""
    llm = small_llm(device)
    waiting, running = llm.stream(TEXTS[0], greedy(6)), llm.stream(TEXTS[1], greedy(12))
    tokens = [next(waiting).token_id]
    assert [update.token_id for update in running] == transformers_continuation(
        device, TEXTS[1], 12
    )
    tokens += [update.token_id for update in waiting]
    assert tokens == transformers_continuation(device, TEXTS[0], 6)


def test_generate_within_the_loop_of_a_stream(device: str) -> None:
    llm = small_llm(device)
    tokens = []
    for update in llm.stream(TEXTS[0], greedy()):
        tokens.append(update.token_id)
        if len(tokens) in (1, 4):
            (output,) = llm.generate(TEXTS[1], greedy(6), progress=False)
            assert output.token_ids == transformers_continuation(device, TEXTS[1], 6)
    assert tokens == transformers_continuation(device, TEXTS[0], 16)
    assert_no_block_is_lost(llm)


def test_cancelling_twice_or_after_the_end_changes_nothing(device: str) -> None:
    llm = small_llm(device)
    first, second = (llm.engine.submit(text, greedy()) for text in TEXTS[:2])
    llm.engine.step()
    for _ in range(2):
        llm.engine.cancel(first)
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.cancel(second)
    assert (first.finish_reason, second.finish_reason) == ("cancelled", "length")
    assert second.token_ids == transformers_continuation(device, TEXTS[1], 16)
    assert llm.engine.path_counts[EnginePath.CANCELLED] == 1
    assert_no_block_is_lost(llm)


def _drop_stream_in_cycle(llm: LLM, text: str) -> Any:
    """Begin a stream that only the garbage collector can finalize; return its request."""
    stream = llm.stream(text, greedy(40, ignore_eos=True))
    request = next(stream).request
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    return request


@pytest.mark.sampled_cases
@pytest.mark.parametrize("method", ["_launch", "_add_token", "_finish_request", "_count_paths"])
def test_streams_are_finalized_within_a_step(
    device: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs there; nothing fails, and the step's other requests are unaffected."""
    llm = small_llm(device)
    real = getattr(llm.engine, method)
    collected: list[bool] = []
    dropped_requests: list[Any] = []

    def collect_and_call(*arguments: Any) -> Any:
        if dropped_requests and dropped_requests[0].finish_reason is None and not collected:
            gc.collect()
            collected.append(dropped_requests[0].finish_reason is None)
        return real(*arguments)

    gc.disable()
    try:
        dropped_requests.append(_drop_stream_in_cycle(llm, TEXTS[1]))
        monkeypatch.setattr(llm.engine, method, collect_and_call)
        output = one(llm, TEXTS[0], greedy(ignore_eos=True))
    finally:
        gc.enable()
    assert collected == [True], "expected the stream to be cancelled within the step"
    assert output.token_ids == transformers_continuation(device, TEXTS[0], 16)
    assert dropped_requests[0].finish_reason == "cancelled"
    assert_no_block_is_lost(llm)
