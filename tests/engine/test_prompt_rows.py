"""Short prompts stored as rows that decode: the texts are those of prompts that are not."""

from __future__ import annotations

from typing import Any

import pytest

from roseinfer import LLM, EnginePath, Guide, SamplingParams
from tests.engine.continuations import TEXTS, greedy, small_llm

DRAWN = SamplingParams(temperature=0.9, top_k=20, seed=4, max_new_tokens=9, ignore_eos=True)
TOLD = greedy(6, ignore_eos=True, logprobs=True, top_logprobs=3)
PARAMS = [greedy(12), DRAWN, TOLD, greedy(1), DRAWN]
IN_ROWS = EnginePath.PROMPTS_AS_ROWS


def with_rows(device: str, most: int = 64, **more: Any) -> LLM:
    return small_llm(device, resident_decode=True, prompt_rows=most, **more)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"run_ahead": 3},
        {"run_ahead": 2, "prefill_max_tokens": 5},
        {"prefill_max_batch_size": 1, "max_batch_size": 2},
        {"kv_cache_tokens": 64, "block_size": 4},
        {"prefix_cache": False, "block_size": 2},
    ],
    ids=str,
)
def test_texts_are_the_same(device: str, config: dict[str, Any]) -> None:
    """Alone and together, in chunks, behind what is stored already, and when memory runs out."""
    rows = with_rows(device, **config)
    plain = with_rows(device, most=0, **config)
    for _ in range(2):
        found = rows.generate(TEXTS, PARAMS, progress=False)
        wanted = plain.generate(TEXTS, PARAMS, progress=False)
        for one, other in zip(found, wanted, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert rows.engine.path_counts[IN_ROWS] > 1
    assert not plain.engine.path_counts[IN_ROWS]


def test_what_rows_cannot_do_is_done_without(device: str) -> None:
    llm = with_rows(device, most=16, prefix_cache=False)
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


def test_a_step_that_breaks_off_leaves_no_row_behind(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the rows of the step before it store their tokens again, in blocks that others have."""
    llm = with_rows(device)
    want = llm.generate(TEXTS, greedy(8), progress=False)
    assert llm.engine._runner._prompt_rows is not None
    rows = llm.engine._runner._prompt_rows._rows._rows

    def breaks_down(*_: Any) -> None:
        monkeypatch.undo()
        raise MemoryError("no room")

    monkeypatch.setattr(rows, "put_rows", breaks_down)
    request = llm.engine.submit(llm.tokenizer.encode("b"), greedy(2))
    with pytest.raises(MemoryError):
        llm.engine.step()
    while not request.finish_reason:
        llm.engine.step()
    assert int(rows.active(len(rows.tokens)).sum()) == 1
    found = llm.generate(TEXTS, greedy(8), progress=False)
    assert [each.token_ids for each in found] == [each.token_ids for each in want]
