"""Completions with guides: they match their guide in all settings, and change no other request."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from roseinfer import EnginePath, Guide, RequestOutput, SamplingParams
from roseinfer.models.tiny import byte_tokenizer
from tests.engine.repeating_models import draft_counts, repeating_llm
from tests.guided.constraints import (
    JUDGED_GUIDES,
    SETTINGS,
    JudgedGuide,
    draw_params,
    draw_prompt,
    engine,
    generate_all,
)


# 210 completions in all. Slots are slow on a CPU.
@pytest.mark.slow
@pytest.mark.parametrize(("setting", "each"), [("no slots", 35), ("batch of two", 2)])
def test_stopped_completions_match_their_guide(device: str, setting: str, each: int) -> None:
    rng = random.Random(1)
    judged_guides = [judged for judged in JUDGED_GUIDES.values() for _ in range(each)]
    prompts = [draw_prompt(rng) for _ in judged_guides]
    params = [draw_params(rng, judged, max_new_tokens=160) for judged in judged_guides]
    stopped: dict[str, int] = dict.fromkeys(JUDGED_GUIDES, 0)
    names = [name for name in JUDGED_GUIDES for _ in range(each)]
    outputs = generate_all(engine(device, **SETTINGS[setting]), prompts, params)
    for name, judged, params_of_request, output in zip(
        names, judged_guides, params, outputs, strict=True
    ):
        assert output.error is None
        assert output.text is not None
        if output.finish_reason == "stop":
            stopped[name] += 1
            assert judged.judge(output.text), output.text
        else:
            assert len(output.token_ids) == params_of_request.max_new_tokens
    assert stopped.pop("an object") > 0 or each < 35  # unbounded guides seldom end
    assert set(stopped.values()) == {each}


def draw_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Draw requests, half of them without a guide. Two have the same prompt."""
    rng = random.Random(5)
    judged_guides: list[JudgedGuide | None] = [
        *JUDGED_GUIDES.values(),
        *[None] * len(JUDGED_GUIDES),
    ]
    rng.shuffle(judged_guides)
    prompts = [draw_prompt(rng) for _ in judged_guides[:-1]]
    return [*prompts, prompts[0]], [draw_params(rng, judged) for judged in judged_guides]


@cache
def alone(device: str) -> list[RequestOutput]:
    """Serve each request by itself, one step at a time."""
    llm = engine(device, resident_decode=False, prefix_cache=False)
    return [
        generate_all(llm, [prompt], [params_of_request])[0]
        for prompt, params_of_request in zip(*draw_requests(), strict=True)
    ]


@pytest.mark.sampled_cases
@pytest.mark.parametrize("setting", SETTINGS)
def test_requests_get_the_tokens_they_get_alone(device: str, setting: str) -> None:
    """Requests with and without guides share steps."""
    llm = engine(device, **SETTINGS[setting])
    outputs = generate_all(llm, *draw_requests())
    for output, expected in zip(outputs, alone(device), strict=True):
        assert output.error is None
        assert output.token_ids == expected.token_ids
        assert (output.text, output.finish_reason) == (expected.text, expected.finish_reason)
    counts = llm.engine.path_counts
    assert bool(counts[EnginePath.GUIDED]) == bool(SETTINGS[setting].get("resident_decode"))
    assert counts[EnginePath.RECOMPUTED] > 0 or "few blocks" not in setting


def test_fused_argmax_respects_token_masks(device: str) -> None:
    """If all requests are greedy, the final kernels of a step read the masked logits."""
    config = {"attention_backend": "triton", "fused_model": True, "max_batch_size": 2}
    llm = engine(device, resident_decode=True, run_ahead=2, **config)
    params = [SamplingParams(guide=JUDGED_GUIDES["words"].guide), SamplingParams(max_new_tokens=3)]
    actual = generate_all(llm, [[1, 2, 3], [4]], params)
    expected = generate_all(engine(device, resident_decode=False), [[1, 2, 3], [4]], params)
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    counts = llm.engine.path_counts
    assert counts[EnginePath.FUSED_ARGMAX] >= counts[EnginePath.GUIDED] > 0


@pytest.mark.slow
@pytest.mark.parametrize("resident", [False, True])
def test_requests_with_guides_are_not_drafted(device: str, resident: bool) -> None:
    """They are not, however repetitive; other requests in their steps are."""
    guided = SamplingParams(guide=Guide(regex="((ab){3}c){12}"), max_new_tokens=70)
    free = SamplingParams(max_new_tokens=70, ignore_eos=True)
    texts = []
    for speculation in ("ngram", None):
        config: dict[str, Any] = {"resident_decode": resident, "speculation": speculation}
        llm = repeating_llm(device, tokenizer=byte_tokenizer(), **config)
        alone = [generate_all(llm, [[1, 2]], [each])[0].token_ids for each in (guided, free)]
        drafts = draft_counts(llm)[0]
        assert bool(drafts) == (speculation is not None)
        both = [each.token_ids for each in generate_all(llm, [[1, 2], [1, 2]], [guided, free])]
        assert both == alone
        total_drafts = draft_counts(llm)[0]
        assert total_drafts <= 2.5 * drafts  # of the free request, which is drafted in other steps
        generate_all(llm, [[1, 2]], [guided])
        assert draft_counts(llm)[0] == total_drafts
        texts.append(both)
    assert texts[0] == texts[1]
    assert bytes(texts[0][0]) == b"abababc" * 10


def test_steps_run_ahead_again_after_guides(device: str) -> None:
    """Steps are synchronous while any request has a guide, and only then."""
    llm = engine(device, resident_decode=True, run_ahead=2)
    long = SamplingParams(max_new_tokens=60, ignore_eos=True)
    (expected,) = generate_all(llm, [[1, 2, 3]], [long])
    counts = llm.engine.path_counts
    run_ahead_steps = counts[EnginePath.RUN_AHEAD]
    short = draw_params(random.Random(0), JUDGED_GUIDES["words"])
    actual, word = generate_all(llm, [[1, 2, 3], [7]], [long, short])
    assert actual.token_ids == expected.token_ids
    assert JUDGED_GUIDES["words"].judge(str(word.text))
    guided = counts[EnginePath.GUIDED]
    assert 0 < guided < 20
    assert run_ahead_steps - 20 < counts[EnginePath.RUN_AHEAD] - run_ahead_steps < run_ahead_steps
    generate_all(llm, [[1, 2, 3]], [long])
    assert counts[EnginePath.GUIDED] == guided


def test_reused_slot_allows_all_tokens_again(device: str) -> None:
    """The next request there runs while another guide is followed, so that masks are read."""
    llm = engine(device, resident_decode=True, max_batch_size=2)
    rng = random.Random(3)
    free = SamplingParams(max_new_tokens=30, ignore_eos=True)
    long = SamplingParams(
        max_new_tokens=200, guide=JUDGED_GUIDES["an object"].guide, ignore_eos=True
    )
    word = draw_params(rng, JUDGED_GUIDES["words"])
    prompts = [[1], [2], [3]]
    outputs = generate_all(llm, prompts, [long, word, free])
    (expected,) = generate_all(engine(device, resident_decode=False), [[3]], [free])
    assert outputs[2].token_ids == expected.token_ids


@pytest.mark.parametrize("setting", ["no slots", "slots"])
def test_paused_request_with_a_guide_continues(device: str, setting: str) -> None:
    llm = engine(device, **SETTINGS[setting])
    params_of_request = draw_params(random.Random(2), JUDGED_GUIDES["a schema"], temperature=1.0)
    (expected,) = generate_all(llm, [[4, 5]], [params_of_request])
    request = llm.engine.submit([4, 5], params_of_request)
    steps: dict[int, Any] = {3: llm.engine.pause, 6: llm.engine.resume}
    for step in range(200):
        if step in steps:
            steps[step](request)
        llm.engine.step()
    assert request.token_ids == expected.token_ids
