"""Engine in another process: tokens, errors, and unread streams."""

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
    from tests.engine_client.conftest import EngineDriver

LONG = SamplingParams(max_new_tokens=900, ignore_eos=True)
PROMPT = [*b"It was a dark"]


async def read_to_the_end(group: RequestGroup, count: int = 1) -> list[OutputDelta]:
    whole = [OutputDelta() for _ in range(count)]
    while not all(part.is_final for part in whole):
        for number, part in await group.next():
            whole[number].extend(part)
    group.cancel()
    return whole


async def await_idle(engine_driver: EngineDriver) -> None:
    """Wait until the engine reports that nothing is held."""
    while engine_driver.engine.stats.running or engine_driver.engine.stats.num_held:
        await asyncio.sleep(0.01)


async def generate_with_guide(engine_driver: EngineDriver, guide: Guide) -> list[OutputDelta]:
    group = engine_driver.engine.open_group()
    group.add(PROMPT, SamplingParams(guide=guide))
    return await read_to_the_end(group)


@pytest.mark.slow
def test_outputs_match_those_of_an_llm(engine_driver: EngineDriver) -> None:
    prompts = [PROMPT[:length] for length in range(1, len(PROMPT))]
    params_by_prompt = [
        SamplingParams(
            max_new_tokens=40 + length,
            temperature=length % 2,
            seed=7,
            top_logprobs=length % 3,
            prompt_logprobs=length % 4 == 0,
        )
        for length in range(len(prompts))
    ]
    outputs = LLM("tiny", device="cpu").generate(prompts, params_by_prompt)

    async def generate_all() -> list[OutputDelta]:
        group = engine_driver.engine.open_group()
        for prompt, params in zip(prompts, params_by_prompt, strict=True):
            group.add(prompt, params)
        return await read_to_the_end(group, len(prompts))

    for part, output in zip(engine_driver.run(generate_all()), outputs, strict=True):
        assert (part.tokens, part.text) == (output.token_ids, output.text)
        assert part.finish_reason == output.finish_reason
        assert part.logprobs == pytest.approx(output.logprobs or [], abs=1e-4)
        tops = [[token for token, _ in top] for top in part.top_logprobs]
        assert tops == [[token for token, _ in top] for top in output.top_logprobs or []]
        assert part.prefill_stats is not None
        assert len(part.prefill_stats.logprobs) == len(output.prompt_logprobs or [])
    engine_driver.run(await_idle(engine_driver))


@pytest.mark.sampled_cases
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
def test_rejected_prompt_has_the_same_error_as_in_process(
    engine_driver: EngineDriver, prompt: list[int], params: SamplingParams, error: RoseinferError
) -> None:
    async def submit_both() -> list[OutputDelta]:
        group = engine_driver.engine.open_group()
        group.add(prompt, params)
        group.add(PROMPT, params)
        return await read_to_the_end(group, 2)

    bad, good = engine_driver.run(submit_both())
    assert type(bad.error) is type(error)
    assert str(bad.error) == str(error)
    assert (good.error, len(good.tokens)) == (None, 16)


def test_unchecked_invalid_guide_fails_only_its_request(engine_driver: EngineDriver) -> None:
    (part,) = engine_driver.run(generate_with_guide(engine_driver, Guide(regex="(")))
    assert isinstance(part.error, BadArgument)
    assert str(part.error).startswith("the constraint cannot be compiled")


def test_guides_are_checked_in_the_other_process(engine_driver: EngineDriver) -> None:
    with pytest.raises((BadArgument, ConfigError), match="the constraint cannot be compiled"):
        engine_driver.run(engine_driver.engine.check_guide(Guide(regex="(")))
    guide = Guide(regex="[ab]{7}")
    engine_driver.run(engine_driver.engine.check_guide(guide))
    (part,) = engine_driver.run(generate_with_guide(engine_driver, guide))
    assert len(part.text) == 7
    assert {*part.text} <= {*"ab"}


def test_hostile_guide_does_not_affect_other_requests(engine_driver: EngineDriver) -> None:
    hostile = Guide(json_schema={"type": "integer", "multipleOf": 2147483648})

    async def both() -> tuple[BaseException | None, OutputDelta]:
        check = asyncio.create_task(engine_driver.engine.check_guide(hostile))
        await engine_driver.engine.check_guide(Guide(regex="[cd]{5}"))
        (part,) = await generate_with_guide(engine_driver, Guide(regex="[cd]{5}"))
        (rejection,) = await asyncio.gather(check, return_exceptions=True)
        return rejection, part

    rejection, part = engine_driver.run(both())
    assert isinstance(rejection, BadArgument)
    assert "processor time" in str(rejection)
    assert len(part.text) == 5


@pytest.mark.slow
def test_unread_stream_is_paused_while_another_runs(engine_driver: EngineDriver) -> None:
    """The request continues when it is read, and no token is lost."""
    (output,) = LLM("tiny", device="cpu").generate([PROMPT], LONG)

    async def read_slowly() -> tuple[int, OutputDelta]:
        group, other_group = engine_driver.engine.open_group(), engine_driver.engine.open_group()
        group.add(PROMPT, LONG)
        while not engine_driver.engine.stats.running:
            await asyncio.sleep(0.01)
        while engine_driver.engine.stats.running:
            await asyncio.sleep(0.01)
        other_group.add(PROMPT[:5], SamplingParams(max_new_tokens=300, ignore_eos=True))
        (other,) = await read_to_the_end(other_group)
        assert len(other.tokens) == 300
        ((_, first),) = await group.next()
        unread = first.count
        (rest,) = await read_to_the_end(group)
        first.extend(rest)
        return unread, first

    unread, part = engine_driver.run(read_slowly())
    assert MAX_UNREAD_UPDATES <= unread < MAX_UNREAD_UPDATES + 8
    assert (part.tokens, part.finish_reason) == (output.token_ids, "length")


def test_cancelled_group_ends_at_once_and_stats_return_to_zero(engine_driver: EngineDriver) -> None:
    """It holds blocks while it runs, and leaves only those of its few tokens cached."""

    async def submit_and_cancel() -> tuple[int, int]:
        group, before = engine_driver.engine.open_group(), engine_driver.engine.stats.num_cached
        for number in range(8):
            group.add([200, number], LONG)
        await group.next()
        running = engine_driver.engine.stats.running
        group.cancel()
        await asyncio.wait_for(await_idle(engine_driver), 1)
        return running, engine_driver.engine.stats.num_cached - before

    running, cached = engine_driver.run(submit_and_cancel())
    assert running
    assert cached <= 8
    assert not engine_driver.engine._open


def test_request_cancelled_during_guide_compilation_never_starts(
    engine_driver: EngineDriver,
) -> None:
    async def submit_and_cancel() -> None:
        group = engine_driver.engine.open_group()
        words = "|".join(f"{number}x*" for number in range(900))
        guides = [Guide(regex=f"({words}|{number})") for number in range(20)]
        checks = asyncio.gather(*map(engine_driver.engine.check_guide, guides))
        await asyncio.sleep(0)
        group.add(PROMPT, SamplingParams(guide=Guide(regex=f"({words}|never)")))
        await asyncio.sleep(0.001)
        group.cancel()
        await checks
        await engine_driver.engine.check_guide(Guide(regex="behind them"))
        await asyncio.wait_for(await_idle(engine_driver), 1)
        await asyncio.sleep(0.2)  # enough time for a request to start

    before = engine_driver.engine.stats.prefix_queries
    engine_driver.run(submit_and_cancel())
    assert engine_driver.engine.stats.prefix_queries == before
