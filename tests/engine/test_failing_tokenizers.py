"""Tokenizers that fail on some text: real ones, which raise ``Exception`` or panic in Rust."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM, BadArgument, tiny_gpt2
from tests.engine.served_streams import collect, greedy, run, serving, tokens_of
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.engine.tokenizers import panics_at_encoding, words

if TYPE_CHECKING:
    from collections.abc import Callable

KNOWN = [f"w{at}" for at in range(257)]
TEXTS = ["w1 w2 w3", "w50 w60"]
UNREADABLE = [(words, "w1 rose", "Missing [UNK] token"), (panics_at_encoding, "x" * 60, "Panic")]
each_tokenizer = pytest.mark.parametrize(
    ("make", "unreadable", "said"), UNREADABLE, ids=["without UNK", "panics"]
)


def tiny_with(device: str, tokenizer: Any) -> LLM:
    model = tiny_gpt2(device).model
    return LLM(model, tokenizer=tokenizer, device=device, dtype="float32", kv_cache_tokens=512)


def expected(device: str) -> list[list[int]]:
    outputs = tiny_with(device, words(KNOWN)).generate(TEXTS, greedy(), progress=False)
    return [output.token_ids for output in outputs]


@each_tokenizer
def test_a_prompt_that_cannot_be_read_fails_alone(
    device: str, make: Callable[[list[str]], Any], unreadable: str, said: str
) -> None:
    llm = tiny_with(device, make(KNOWN))
    prompts = [TEXTS[0], unreadable, TEXTS[1]]
    first, refused, second = llm.generate(prompts, greedy(), progress=False)
    assert (refused.token_ids, refused.text, refused.finish_reason) == ([], None, "error")
    assert refused.error is not None
    assert "the tokenizer can read" in refused.error
    assert said in refused.error
    assert [first.token_ids, second.token_ids] == expected(device)
    assert_no_block_is_lost(llm)


@each_tokenizer
def test_a_stream_of_such_a_prompt_is_told_why_and_the_others_go_on(
    device: str, make: Callable[[list[str]], Any], unreadable: str, said: str
) -> None:
    with serving(tiny_with(device, make(KNOWN))) as served:

        async def beside_others() -> Any:
            prompts = [TEXTS[0], unreadable, TEXTS[1]]
            streams = (collect(served, prompt) for prompt in prompts)
            return await asyncio.gather(*streams, return_exceptions=True)

        first, refused, second = run(beside_others())
    assert isinstance(refused, BadArgument)
    assert said in str(refused)
    assert [tokens_of(first), tokens_of(second)] == expected(device)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_whoever_wants_to_leave_may(device: str, error: type[BaseException]) -> None:
    """What ends the whole program is no prompt's own failure."""

    class Leaves:
        def __iter__(self) -> Any:
            raise error

    llm = tiny_with(device, words(KNOWN))
    prompts: list[Any] = [TEXTS[0], Leaves()]
    with pytest.raises(error):
        llm.generate(prompts, greedy(), progress=False)
    assert not llm.engine.has_work
    assert_no_block_is_lost(llm)
