"""An engine in another process: its texts, its errors, and readers that do not read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.config import MAX_UNREAD_UPDATES
from roseinfer.engine_client.protocol import OutputDelta
from roseinfer.errors import BadArgument, ConfigError, RequestTooLarge
from roseinfer.guided.guide import Guide

if TYPE_CHECKING:
    from roseinfer.engine_client.protocol import RequestGroup
    from roseinfer.errors import RoseinferError
    from tests.engine_client.conftest import Driven

LONG = SamplingParams(max_new_tokens=900, ignore_eos=True)
PROMPT = [*b"It was a dark"]


async def until_its_end(texts: RequestGroup, count: int = 1) -> list[OutputDelta]:
    whole = [OutputDelta() for _ in range(count)]
    while not all(part.is_final for part in whole):
        for number, part in await texts.next():
            whole[number].extend(part)
    texts.cancel()
    return whole


async def at_rest(driven: Driven) -> None:
    """Wait until the engine says that nothing is held."""
    while driven.engine.stats.running or driven.engine.stats.num_held:
        await asyncio.sleep(0.01)


async def of_guide(driven: Driven, guide: Guide) -> list[OutputDelta]:
    texts = driven.engine.open_group()
    texts.add(PROMPT, SamplingParams(guide=guide))
    return await until_its_end(texts)


def test_texts_are_those_of_an_llm(driven: Driven) -> None:
    prompts = [PROMPT[:length] for length in range(1, len(PROMPT))]
    asked = [
        SamplingParams(
            max_new_tokens=40 + length,
            temperature=length % 2,
            seed=7,
            top_logprobs=length % 3,
            prompt_logprobs=length % 4 == 0,
        )
        for length in range(len(prompts))
    ]
    outputs = LLM("tiny", device="cpu").generate(prompts, asked)

    async def all_of_them() -> list[OutputDelta]:
        texts = driven.engine.open_group()
        for prompt, params in zip(prompts, asked, strict=True):
            texts.add(prompt, params)
        return await until_its_end(texts, len(prompts))

    for part, output in zip(driven.run(all_of_them()), outputs, strict=True):
        assert (part.tokens, part.text) == (output.token_ids, output.text)
        assert part.finish_reason == output.finish_reason
        assert part.logprobs == pytest.approx(output.logprobs or [], abs=1e-4)
        tops = [[token for token, _ in top] for top in part.top_logprobs]
        assert tops == [[token for token, _ in top] for top in output.top_logprobs or []]
        assert part.prefill_stats is not None
        assert len(part.prefill_stats.logprobs) == len(output.prompt_logprobs or [])
    driven.run(at_rest(driven))


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], SamplingParams(), BadArgument("an empty prompt: at least one token is needed")),
        ([999], SamplingParams(), BadArgument("token ids must lie in 0..256")),
        (
            [1] * 1024,
            SamplingParams(),
            RequestTooLarge(
                "a prompt of 1024 tokens leaves no room for a new one: the model has 1024 positions"
            ),
        ),
    ],
    ids=["empty", "unknown", "too long"],
)
def test_what_is_refused_over_there_is_refused_in_the_same_words(
    driven: Driven, prompt: list[int], params: SamplingParams, error: RoseinferError
) -> None:
    async def refused() -> list[OutputDelta]:
        texts = driven.engine.open_group()
        texts.add(prompt, params)
        texts.add(PROMPT, params)
        return await until_its_end(texts, 2)

    bad, good = driven.run(refused())
    assert type(bad.error) is type(error)
    assert str(bad.error) == str(error)
    assert (good.error, len(good.tokens)) == (None, 16)


def test_a_guide_that_nobody_looked_at_before_ends_its_text_alone(driven: Driven) -> None:
    (part,) = driven.run(of_guide(driven, Guide(regex="(")))
    assert isinstance(part.error, BadArgument)
    assert str(part.error).startswith("the constraint cannot be compiled")


def test_guides_are_looked_at_over_there(driven: Driven) -> None:
    with pytest.raises((BadArgument, ConfigError), match="the constraint cannot be compiled"):
        driven.run(driven.engine.check_guide(Guide(regex="(")))
    guide = Guide(regex="[ab]{7}")
    driven.run(driven.engine.check_guide(guide))
    (part,) = driven.run(of_guide(driven, guide))
    assert len(part.text) == 7
    assert {*part.text} <= {*"ab"}


def test_a_hostile_guide_harms_no_text(driven: Driven) -> None:
    hostile = Guide(json_schema={"type": "integer", "multipleOf": 2147483648})

    async def both() -> tuple[BaseException | None, OutputDelta]:
        check = asyncio.create_task(driven.engine.check_guide(hostile))
        await driven.engine.check_guide(Guide(regex="[cd]{5}"))
        (part,) = await of_guide(driven, Guide(regex="[cd]{5}"))
        (refusal,) = await asyncio.gather(check, return_exceptions=True)
        return refusal, part

    refusal, part = driven.run(both())
    assert isinstance(refusal, BadArgument)
    assert "processor time" in str(refusal)
    assert len(part.text) == 5


def test_a_text_that_nobody_reads_waits_and_another_does_not(driven: Driven) -> None:
    """It goes on when it is read, and nothing of it is lost."""
    (output,) = LLM("tiny", device="cpu").generate([PROMPT], LONG)

    async def slow() -> tuple[int, OutputDelta]:
        texts, beside = driven.engine.open_group(), driven.engine.open_group()
        texts.add(PROMPT, LONG)
        while not driven.engine.stats.running:
            await asyncio.sleep(0.01)
        while driven.engine.stats.running:
            await asyncio.sleep(0.01)
        beside.add(PROMPT[:5], SamplingParams(max_new_tokens=300, ignore_eos=True))
        (other,) = await until_its_end(beside)
        assert len(other.tokens) == 300
        ((_, first),) = await texts.next()
        unread = first.count
        (rest,) = await until_its_end(texts)
        first.extend(rest)
        return unread, first

    unread, part = driven.run(slow())
    assert MAX_UNREAD_UPDATES <= unread < MAX_UNREAD_UPDATES + 8
    assert (part.tokens, part.finish_reason) == (output.token_ids, "length")


def test_a_text_that_is_left_ends_within_a_step_and_figures_come_to_rest(driven: Driven) -> None:
    """It holds blocks while it runs, and leaves behind those of the few tokens that it got."""

    async def leaving() -> tuple[int, int]:
        texts, before = driven.engine.open_group(), driven.engine.stats.num_cached
        for number in range(8):
            texts.add([200, number], LONG)
        await texts.next()
        running = driven.engine.stats.running
        texts.cancel()
        await asyncio.wait_for(at_rest(driven), 1)
        return running, driven.engine.stats.num_cached - before

    running, cached = driven.run(leaving())
    assert running
    assert cached <= 8
    assert not driven.engine._open


def test_one_that_is_left_while_its_guide_is_prepared_never_begins(driven: Driven) -> None:
    async def leaving() -> None:
        texts = driven.engine.open_group()
        words = "|".join(f"{number}x*" for number in range(900))
        guides = [Guide(regex=f"({words}|{number})") for number in range(20)]
        checks = asyncio.gather(*map(driven.engine.check_guide, guides))
        await asyncio.sleep(0)
        texts.add(PROMPT, SamplingParams(guide=Guide(regex=f"({words}|never)")))
        await asyncio.sleep(0.001)
        texts.cancel()
        await checks
        await driven.engine.check_guide(Guide(regex="behind them"))
        await asyncio.wait_for(at_rest(driven), 1)
        await asyncio.sleep(0.2)  # within which a text would show

    before = driven.engine.stats.prefix_queries
    driven.run(leaving())
    assert driven.engine.stats.prefix_queries == before
