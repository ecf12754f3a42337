"""Tokenizers that fail on some text, by ``Exception`` or by a panic in Rust."""

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

WORDS = [f"w{at}" for at in range(257)]
TEXTS = ["w1 w2 w3", "w50 w60"]
UNREADABLE = [(words, "w1 rose", "Missing [UNK] token"), (panics_at_encoding, "x" * 60, "Panic")]
failing_tokenizers = pytest.mark.parametrize(
    ("build", "unreadable", "reason"), UNREADABLE, ids=["without UNK", "panics"]
)


def tiny_with(device: str, tokenizer: Any) -> LLM:
    model = tiny_gpt2(device).model
    return LLM(model, tokenizer=tokenizer, device=device, dtype="float32", kv_cache_tokens=512)


def expected(device: str) -> list[list[int]]:
    outputs = tiny_with(device, words(WORDS)).generate(TEXTS, greedy(), progress=False)
    return [output.token_ids for output in outputs]


@failing_tokenizers
def test_prompt_that_cannot_be_tokenized_fails_alone(
    device: str, build: Callable[[list[str]], Any], unreadable: str, reason: str
) -> None:
    llm = tiny_with(device, build(WORDS))
    prompts = [TEXTS[0], unreadable, TEXTS[1]]
    first, rejected, second = llm.generate(prompts, greedy(), progress=False)
    assert (rejected.token_ids, rejected.text, rejected.finish_reason) == ([], None, "error")
    assert rejected.error is not None
    assert "the tokenizer can read" in rejected.error
    assert reason in rejected.error
    assert [first.token_ids, second.token_ids] == expected(device)
    assert_no_block_is_lost(llm)


def test_lone_surrogate_of_a_prompt_is_reported(device: str) -> None:
    llm = LLM("tiny", device=device, kv_cache_tokens=512)
    (rejected,) = llm.generate(["ab\udcff"], greedy(), progress=False)
    assert "character 2, '\\udcff', is a lone surrogate" in str(rejected.error)


@failing_tokenizers
def test_stream_of_an_untokenizable_prompt_raises_alone(
    device: str, build: Callable[[list[str]], Any], unreadable: str, reason: str
) -> None:
    with serving(tiny_with(device, build(WORDS))) as served:

        async def collect_all() -> Any:
            prompts = [TEXTS[0], unreadable, TEXTS[1]]
            streams = (collect(served, prompt) for prompt in prompts)
            return await asyncio.gather(*streams, return_exceptions=True)

        first, rejected, second = run(collect_all())
    assert isinstance(rejected, BadArgument)
    assert reason in str(rejected)
    assert [tokens_of(first), tokens_of(second)] == expected(device)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_program_exit_in_a_prompt_is_raised(device: str, error: type[BaseException]) -> None:
    """Errors that end the program are not failures of a prompt."""

    class RaisingPrompt:
        def __iter__(self) -> Any:
            raise error

    llm = tiny_with(device, words(WORDS))
    prompts: list[Any] = [TEXTS[0], RaisingPrompt()]
    with pytest.raises(error):
        llm.generate(prompts, greedy(), progress=False)
    assert not llm.engine.has_work
    assert_no_block_is_lost(llm)


# ------------------------------------------------------------------------------ completions


class Panic(BaseException):
    """Rust panic as it reaches Python: not an ``Exception``."""


def llm_with_undecodable_token(device: str) -> tuple[LLM, list[int]]:
    """Build an engine whose tokenizer panics at a token, and return the tokens up to it."""
    first, second = expected(device)
    at = next(at for at, token in enumerate(first) if at > 3 and token not in first[:at] + second)
    words_of_ids = [" " if number == first[at] else word for number, word in enumerate(WORDS)]
    return tiny_with(device, panics_at_decoding(words_of_ids)), first[: at + 1]


def test_undecodable_completion_fails_alone(device: str) -> None:
    llm, tokens = llm_with_undecodable_token(device)
    failed, second = llm.generate(TEXTS, greedy(), progress=False)
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert failed.error.startswith("the tokenizer cannot turn these tokens into text: Panic")
    assert failed.token_ids == tokens
    assert failed.text == "".join(WORDS[token] for token in tokens[:-1])
    assert second.token_ids == expected(device)[1]
    assert second.error is None
    assert_no_block_is_lost(llm)


def test_undecodable_stream_yields_its_text_and_raises(device: str) -> None:
    llm, tokens = llm_with_undecodable_token(device)
    with serving(llm) as served:
        updates: list[Update] = []

        async def read() -> None:
            async for update in served.stream(TEXTS[0], greedy()):
                updates.append(update)

        async def collect_both() -> Any:
            both = (read(), collect(served, TEXTS[1]))
            return await asyncio.gather(*both, return_exceptions=True)

        error, other = run(collect_both())
    assert isinstance(error, DetokenizationFailed)
    assert tokens_of(updates) == tokens
    assert updates[-1].finish_reason == "error"
    assert tokens_of(other) == expected(device)[1]


@pytest.mark.parametrize("error", [Panic("flush"), ValueError("flush")], ids=repr)
def test_failing_flush_is_an_error_of_its_request(
    device: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    llm = tiny_with(device, words(WORDS))
    whole = llm.generate(TEXTS, greedy(), progress=False)
    flush = ChainDetokenizer.flush
    calls = iter(range(9))

    def flush_or_fail(self: ChainDetokenizer) -> str:
        if next(calls) == 0:
            raise error
        return flush(self)

    monkeypatch.setattr(ChainDetokenizer, "flush", flush_or_fail)
    requests = [llm.engine.submit(text, greedy()) for text in TEXTS]
    last_updates = [update for update in updates_of(llm) if update.finish_reason]
    assert [last.request for last in last_updates] == requests
    assert [last.finish_reason for last in last_updates] == ["error", whole[1].finish_reason]
    assert [request.token_ids for request in requests] == [each.token_ids for each in whole]
    assert isinstance(requests[0].error, DetokenizationFailed)
    assert f"{type(error).__name__}: flush" in str(requests[0].error)
    assert requests[1].error is None
    assert_no_block_is_lost(llm)


def test_first_of_two_failures_is_reported(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> str:
        raise Panic("add" if arguments[1:] else "flush")

    llm = tiny_with(device, words(WORDS))
    for method in ("add", "flush"):
        monkeypatch.setattr(ChainDetokenizer, method, fail)
    (output,) = llm.generate(TEXTS[0], greedy(), progress=False)
    assert "Panic: add" in str(output.error)
    assert_no_block_is_lost(llm)


def test_ctrl_c_in_a_tokenizer_is_raised(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> str:
        raise KeyboardInterrupt

    for method in ("add", "flush"):
        llm = tiny_with(device, words(WORDS))
        monkeypatch.setattr(ChainDetokenizer, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS, greedy(), progress=False)
        monkeypatch.undo()
