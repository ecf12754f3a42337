"""Tokenizers that fail on some text: real ones, which raise ``Exception`` or panic in Rust."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM, BadArgument, DetokenizationFailed, tiny_gpt2
from roseinfer.text.decoder_chain import ChainDetokenizer
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.engine.test_run_ahead import run as updates_of
from tests.llm.served_streams import collect, greedy, run, serving, tokens_of
from tests.text.tokenizers import panics_at_decoding, panics_at_encoding, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.engine.engine import Update

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


def test_a_prompt_with_half_a_character_says_which(device: str) -> None:
    llm = LLM("tiny", device=device, kv_cache_tokens=512)
    (refused,) = llm.generate(["ab\udcff"], greedy(), progress=False)
    assert "character 2, '\\udcff', is a lone surrogate" in str(refused.error)


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


# ------------------------------------------------------------------------------------ texts


class Panic(BaseException):
    """A panic in Rust reaches Python like this: it is no ``Exception``."""


def unwritable(device: str) -> tuple[LLM, list[int]]:
    """An engine whose tokenizer panics at one token of the first text, and the tokens up to it."""
    first, second = expected(device)
    at = next(at for at, token in enumerate(first) if at > 3 and token not in first[:at] + second)
    known = [" " if number == first[at] else word for number, word in enumerate(KNOWN)]
    return tiny_with(device, panics_at_decoding(known)), first[: at + 1]


def test_a_text_that_cannot_be_written_ends_alone(device: str) -> None:
    llm, tokens = unwritable(device)
    broken, second = llm.generate(TEXTS, greedy(), progress=False)
    assert broken.finish_reason == "error"
    assert broken.error is not None
    assert broken.error.startswith("the tokenizer cannot turn these tokens into text: Panic")
    assert broken.token_ids == tokens
    assert broken.text == "".join(KNOWN[token] for token in tokens[:-1])
    assert second.token_ids == expected(device)[1]
    assert second.error is None
    assert_no_block_is_lost(llm)


def test_its_stream_brings_what_could_be_written_and_then_says_why(device: str) -> None:
    llm, tokens = unwritable(device)
    with serving(llm) as served:
        came: list[Update] = []

        async def read() -> None:
            async for update in served.stream(TEXTS[0], greedy()):
                came.append(update)

        async def beside_another() -> Any:
            both = (read(), collect(served, TEXTS[1]))
            return await asyncio.gather(*both, return_exceptions=True)

        error, other = run(beside_another())
    assert isinstance(error, DetokenizationFailed)
    assert tokens_of(came) == tokens
    assert came[-1].finish_reason == "error"
    assert tokens_of(other) == expected(device)[1]


@pytest.mark.parametrize("error", [Panic("flush"), ValueError("flush")], ids=repr)
def test_a_rest_that_cannot_be_written_is_an_error_of_that_text(
    device: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    llm = tiny_with(device, words(KNOWN))
    whole = llm.generate(TEXTS, greedy(), progress=False)
    flush = ChainDetokenizer.flush
    calls = iter(range(9))

    def once(self: ChainDetokenizer) -> str:
        if next(calls) == 0:
            raise error
        return flush(self)

    monkeypatch.setattr(ChainDetokenizer, "flush", once)
    requests = [llm.engine.submit(text, greedy()) for text in TEXTS]
    lasts = [update for update in updates_of(llm) if update.finish_reason]
    assert [last.request for last in lasts] == requests
    assert [last.finish_reason for last in lasts] == ["error", whole[1].finish_reason]
    assert [request.token_ids for request in requests] == [each.token_ids for each in whole]
    assert isinstance(requests[0].error, DetokenizationFailed)
    assert f"{type(error).__name__}: flush" in str(requests[0].error)
    assert requests[1].error is None
    assert_no_block_is_lost(llm)


def test_of_two_failures_the_first_is_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> str:
        raise Panic("add" if arguments[1:] else "flush")

    llm = tiny_with(device, words(KNOWN))
    for method in ("add", "flush"):
        monkeypatch.setattr(ChainDetokenizer, method, fails)
    (output,) = llm.generate(TEXTS[0], greedy(), progress=False)
    assert "Panic: add" in str(output.error)
    assert_no_block_is_lost(llm)


def test_ctrl_c_in_a_tokenizer_is_no_failure_of_a_text(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*_: Any) -> str:
        raise KeyboardInterrupt

    for method in ("add", "flush"):
        llm = tiny_with(device, words(KNOWN))
        monkeypatch.setattr(ChainDetokenizer, method, pressed)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS, greedy(), progress=False)
        monkeypatch.undo()
