"""Stop strings of a request: where its text ends, and that nothing of them is shown."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.engine.continuations import END, TEXTS, by_transformers, greedy, one, small_llm, text_of

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@cache
def readable(device: str, count: int = 24) -> tuple[str, list[int], str]:
    """A prompt whose continuation has three printable characters in a row, and those."""
    for text in [*TEXTS, *map(chr, range(ord("a"), ord("z")))]:
        tokens = by_transformers(device, text, count)
        whole = text_of(device, tokens)
        found = re.search(r"[!-~]{3}", whole[2:])
        if found and END not in tokens:
            return text, tokens, found[0]
    raise AssertionError("the tiny model writes nothing that can be read")


def test_a_stop_string_of_several_tokens(device: str) -> None:
    prompt, tokens, stop = readable(device)
    output = one(small_llm(device), prompt, greedy(len(tokens), stop=("never", stop)))
    whole = text_of(device, tokens)
    needed = next(n for n in range(len(tokens)) if stop in text_of(device, tokens[:n]))
    assert output.text == whole[: whole.index(stop)]
    assert output.token_ids == tokens[:needed]
    assert output.finish_reason == "stop"


def test_no_piece_of_a_stop_string_is_streamed(device: str) -> None:
    prompt, tokens, stop = readable(device)
    llm = small_llm(device)
    updates = list(llm.stream(prompt, greedy(len(tokens), stop=(stop,))))
    whole = text_of(device, tokens)
    assert "".join(update.text for update in updates) == whole[: whole.index(stop)]
    assert [update.token_id for update in updates] == tokens[: len(updates)]
    assert updates[-1].request.finish_reason == "stop"


def test_the_beginning_of_a_stop_string_is_text_if_the_rest_never_comes(device: str) -> None:
    prompt, tokens, stop = readable(device)
    needed = next(n for n in range(len(tokens)) if stop in text_of(device, tokens[:n]))
    output = one(small_llm(device), prompt, greedy(needed - 1, stop=(stop,)))
    assert output.text == text_of(device, tokens[: needed - 1])
    assert output.finish_reason == "length"


def test_stop_strings_are_each_requests_own(device: str) -> None:
    prompt, tokens, stop = readable(device)
    count = len(tokens)
    stopped, other = small_llm(device).generate(
        [prompt, prompt], [greedy(count, stop=(stop,)), greedy(count)], progress=False
    )
    assert (stopped.finish_reason, other.finish_reason) == ("stop", "length")
    assert other.token_ids == tokens


@pytest.mark.parametrize("prompt", TEXTS)
def test_a_stop_string_may_be_completed_by_the_end(device: str, prompt: str) -> None:
    """The parts of a character are held back, and shown by a sign when nothing follows."""
    tokens = by_transformers(device, prompt, 24)
    llm, ends = small_llm(device), set()
    for count in range(1, len(tokens) + 1):
        whole = text_of(device, tokens[:count])
        for stop in {whole[-1:], whole[-2:], whole[-3:], REPLACEMENT} - {""}:
            output = one(llm, prompt, greedy(count, stop=(stop,), ignore_eos=True))
            assert output.text == whole.partition(stop)[0]
            assert output.finish_reason == ("stop" if stop in whole else "length")
            ends.add(whole.endswith(REPLACEMENT) and whole.find(stop) == len(whole) - len(stop))
    assert ends == {False, True}
