"""Short prompts stored as rows of decode steps: completions equal those of usual prefill."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from roseinfer import LLM, EnginePath, Guide, SamplingParams
from roseinfer.engine import runner
from tests.engine.continuations import TEXTS, greedy, small_llm

SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=4, max_new_tokens=9, ignore_eos=True)
WITH_LOGPROBS = greedy(6, ignore_eos=True, logprobs=True, top_logprobs=3)
PARAMS = [greedy(12), SAMPLED, WITH_LOGPROBS, greedy(1), SAMPLED]
IN_ROWS = EnginePath.PROMPTS_AS_ROWS


def with_rows(device: str, max_prompt_rows: int = 64, **more: Any) -> LLM:
    return small_llm(device, resident_decode=True, prompt_rows=max_prompt_rows, **more)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("max_prompt_rows", "config"),
    [
        (64, {}),
        (64, {"run_ahead": 3}),
        (64, {"run_ahead": 2, "prefill_max_tokens": 5}),
        (64, {"prefill_max_batch_size": 1, "max_batch_size": 2}),
        (64, {"kv_cache_tokens": 64, "block_size": 4}),
        (64, {"prefix_cache": False, "block_size": 2}),
        (24, {"run_ahead": 2}),
        (24, {"kv_cache_tokens": 64, "block_size": 4}),
    ],
    ids=str,
)
def test_completions_are_the_same(
    device: str, max_prompt_rows: int, config: dict[str, Any]
) -> None:
    """Together, in several launches, in chunks, after cached prefixes, and when blocks run out."""
    rows = with_rows(device, max_prompt_rows, **config)
    plain = with_rows(device, max_prompt_rows=0, **config)
    for _ in range(2):
        actual = rows.generate(TEXTS, PARAMS, progress=False)
        expected = plain.generate(TEXTS, PARAMS, progress=False)
        for one, other in zip(actual, expected, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert rows.engine.path_counts[IN_ROWS] > 1
    assert not plain.engine.path_counts[IN_ROWS]


def test_unsupported_requests_are_prefilled_as_usual(device: str) -> None:
    llm = with_rows(device, max_prompt_rows=16, prefix_cache=False)
    for prompt, params in [
        ("a", greedy(4, frequency_penalty=0.5)),
        ("a", greedy(4, guide=Guide(regex="[0-9]{3}"))),
        ("Once upon a time", greedy(4, prompt_logprobs=True)),
        ("Once upon a time, long ago", greedy(4)),
    ]:
        llm.generate(prompt, params, progress=False)
        assert llm.engine.path_counts[IN_ROWS] == 0, params
    llm.generate("Once upon", greedy(4), progress=False)
    assert llm.engine.path_counts[IN_ROWS] == 1


@pytest.mark.parametrize(
    ("lengths", "launches"),
    [((7, 9), 1), ((7, 10), 2), ((9, 8, 8, 16), 3), ((9,) * 4, 4), ((9,) * 5, 0), ((3, 17), 0)],
)
def test_prompts_of_a_step_take_few_launches(
    device: str, lengths: tuple[int, ...], launches: int
) -> None:
    """A launch has whole prompts, 16 tokens together at most; a fifth is a forward pass instead."""
    rows, plain = (with_rows(device, each, prefix_cache=False) for each in (16, 0))
    prompts = [[1 + at + 5 * length for at in range(length)] for length in lengths]
    actual, expected = (
        [each.token_ids for each in llm.generate(prompts, greedy(6), progress=False)]
        for llm in (rows, plain)
    )
    assert actual == expected
    counts = rows.engine.path_counts
    assert (counts[IN_ROWS], counts[EnginePath.PROMPTS_IN_LAUNCHES]) == (launches, launches > 1)


@pytest.mark.parametrize(("lengths", "launches"), [((16,), 1), ((7, 10), 2), ((9, 9, 9), 0)])
def test_launches_of_a_large_model_read_its_weights_twice_at_most(
    device: str, lengths: tuple[int, ...], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_rows(device).engine.sequence_runner.model
    monkeypatch.setattr(runner, "_MAX_BYTES_READ", 2 * model.num_weights * model.dtype.itemsize)
    llm = with_rows(device, 16, prefix_cache=False)
    prompts = [[1 + at + 5 * length for at in range(length)] for length in lengths]
    llm.generate(prompts, greedy(2), progress=False)
    assert llm.engine.path_counts[IN_ROWS] == launches


def test_rows_are_used_while_they_read_few_tokens(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is how much all rows read, not how long a sequence is."""
    monkeypatch.setattr(runner, "_MAX_TOKENS_READ", 45)
    llm = with_rows(device, block_size=4)

    def rows_for(prompts: list[list[int]]) -> int:
        before = llm.engine.path_counts[IN_ROWS]
        llm.generate(prompts, greedy(1), progress=False)
        return llm.engine.path_counts[IN_ROWS] - before

    long = [1 + at % 40 for at in range(40)]
    assert rows_for([long]) == 0
    assert rows_for([[*long, 7]]) == 1, "one token behind a cached prefix of 40"
    assert rows_for([[*long, 8, 9]]) == 0, "two, which read 42 each"
    assert rows_for([[50, 51, 52, 53]]) == 1
    assert rows_for([[54, 55, 56, 57], [58, 59, 60, 61, 62, 63]]) == 0, "16 and 36 together"


@pytest.mark.parametrize("failing_launch", [1, 2])
def test_interrupted_step_leaves_no_row(
    device: str, failing_launch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leftover row would store its token again in the next step, in another request's block."""
    llm = with_rows(device, 16, prefix_cache=False)
    expected = llm.generate(TEXTS, greedy(8), progress=False)
    assert llm.engine._runner._prompt_rows is not None
    rows = llm.engine._runner._prompt_rows._rows._rows
    put_rows, launches = rows.put_rows, count(1)

    def fail_once(*arguments: Any) -> None:
        if next(launches) == failing_launch:
            monkeypatch.undo()
            raise MemoryError("no room")
        put_rows(*arguments)

    monkeypatch.setattr(rows, "put_rows", fail_once)
    texts = ["Once upon a dime", "b"][-failing_launch:]  # of 16 tokens and of one
    requests = [llm.engine.submit(llm.tokenizer.encode(text), greedy(2)) for text in texts]
    with pytest.raises(MemoryError):
        llm.engine.step()
    for request in requests[:-1]:
        llm.engine.cancel(request)
    while not requests[-1].finish_reason:
        llm.engine.step()
    assert int(rows.active(len(rows.tokens)).sum()) == 1
    actual = llm.generate(TEXTS, greedy(8), progress=False)
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
