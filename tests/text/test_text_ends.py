"""Stop strings of requests: where a completion ends, and that no part of them is streamed."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.engine.continuations import (
    END,
    TEXTS,
    greedy,
    one,
    small_llm,
    text_of,
    transformers_continuation,
)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@cache
def printable_continuation(device: str, count: int = 24) -> tuple[str, list[int], str]:
    """Return a prompt, its continuation with three printable characters in a row, and those."""
    for text in [*TEXTS, *map(chr, range(ord("a"), ord("z")))]:
        tokens = transformers_continuation(device, text, count)
        whole = text_of(device, tokens)
        match = re.search(r"[!-~]{3}", whole[2:])
        if match and END not in tokens:
            return text, tokens, match[0]
    raise AssertionError("no continuation of the tiny model has three printable characters")


def test_stop_string_of_several_tokens(device: str) -> None:
    prompt, tokens, stop = printable_continuation(device)
    output = one(small_llm(device), prompt, greedy(len(tokens), stop=("never", stop)))
    whole = text_of(device, tokens)
    num_needed = next(n for n in range(len(tokens)) if stop in text_of(device, tokens[:n]))
    assert output.text == whole[: whole.index(stop)]
    assert output.token_ids == tokens[:num_needed]
    assert output.finish_reason == "stop"


def test_no_part_of_a_stop_string_is_streamed(device: str) -> None:
    prompt, tokens, stop = printable_continuation(device)
    llm = small_llm(device)
    updates = list(llm.stream(prompt, greedy(len(tokens), stop=(stop,))))
    whole = text_of(device, tokens)
    assert "".join(update.text for update in updates) == whole[: whole.index(stop)]
    assert [update.token_id for update in updates] == tokens[: len(updates)]
    assert updates[-1].request.finish_reason == "stop"


def test_incomplete_stop_string_is_part_of_the_text(device: str) -> None:
    prompt, tokens, stop = printable_continuation(device)
    num_needed = next(n for n in range(len(tokens)) if stop in text_of(device, tokens[:n]))
    output = one(small_llm(device), prompt, greedy(num_needed - 1, stop=(stop,)))
    assert output.text == text_of(device, tokens[: num_needed - 1])
    assert output.finish_reason == "length"


def test_stop_strings_apply_to_their_request_only(device: str) -> None:
    prompt, tokens, stop = printable_continuation(device)
    count = len(tokens)
    stopped, other = small_llm(device).generate(
        [prompt, prompt], [greedy(count, stop=(stop,)), greedy(count)], progress=False
    )
    assert (stopped.finish_reason, other.finish_reason) == ("stop", "length")
    assert other.token_ids == tokens


@pytest.mark.slow
@pytest.mark.parametrize("prompt", TEXTS)
def test_stop_string_may_be_completed_by_the_end_of_the_text(device: str, prompt: str) -> None:
    """Parts of a character are withheld, and replaced by a sign when nothing follows."""
    tokens = transformers_continuation(device, prompt, 24)
    llm, ends = small_llm(device), set()
    for count in range(1, len(tokens) + 1):
        whole = text_of(device, tokens[:count])
        for stop in {whole[-1:], whole[-2:], whole[-3:], REPLACEMENT} - {""}:
            output = one(llm, prompt, greedy(count, stop=(stop,), ignore_eos=True))
            assert output.text == whole.partition(stop)[0]
            assert output.finish_reason == ("stop" if stop in whole else "length")
            ends.add(whole.endswith(REPLACEMENT) and whole.find(stop) == len(whole) - len(stop))
    assert ends == {False, True}
