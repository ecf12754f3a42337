"""Texts with guides have their form, however they are served, and are in nobody's way."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from roseinfer import EnginePath, Guide, RequestOutput, SamplingParams, byte_tokenizer
from tests.engine.repeating_models import drafted, repeating_llm
from tests.guided.constraints import (
    FORMS,
    SETTINGS,
    Form,
    drawn_params,
    drawn_prompt,
    engine,
    together,
)


# 210 texts in all. On a CPU, slots are slow.
@pytest.mark.parametrize(("setting", "each"), [("without slots", 35), ("two at once", 2)])
def test_texts_that_stop_have_their_form(device: str, setting: str, each: int) -> None:
    rng = random.Random(1)
    forms = [form for form in FORMS.values() for _ in range(each)]
    prompts = [drawn_prompt(rng) for _ in forms]
    params = [drawn_params(rng, form, max_new_tokens=160) for form in forms]
    stopped: dict[str, int] = dict.fromkeys(FORMS, 0)
    names = [name for name in FORMS for _ in range(each)]
    outputs = together(engine(device, **SETTINGS[setting]), prompts, params)
    for name, form, own, output in zip(names, forms, params, outputs, strict=True):
        assert output.error is None
        assert output.text is not None
        if output.finish_reason == "stop":
            stopped[name] += 1
            assert form.judge(output.text), output.text
        else:
            assert len(output.token_ids) == own.max_new_tokens
    assert stopped.pop("an object") > 0 or each < 35  # it seldom ends what has no bound
    assert set(stopped.values()) == {each}


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """Draw requests, half of them without a guide. Two have the same prompt."""
    rng = random.Random(5)
    forms: list[Form | None] = [*FORMS.values(), *[None] * len(FORMS)]
    rng.shuffle(forms)
    prompts = [drawn_prompt(rng) for _ in forms[:-1]]
    return [*prompts, prompts[0]], [drawn_params(rng, form) for form in forms]


@cache
def alone(device: str) -> list[RequestOutput]:
    """Serve each request by itself, one step of the host after the other."""
    llm = engine(device, resident_decode=False, prefix_cache=False)
    return [together(llm, [prompt], [own])[0] for prompt, own in zip(*mixed(), strict=True)]


@pytest.mark.many_alike
@pytest.mark.parametrize("setting", SETTINGS)
def test_each_gets_what_it_gets_alone(device: str, setting: str) -> None:
    """Those with a guide and those without, in the same steps."""
    llm = engine(device, **SETTINGS[setting])
    outputs = together(llm, *mixed())
    for output, want in zip(outputs, alone(device), strict=True):
        assert output.error is None
        assert output.token_ids == want.token_ids
        assert (output.text, output.finish_reason) == (want.text, want.finish_reason)
    counts = llm.engine.path_counts
    assert bool(counts[EnginePath.GUIDED]) == bool(SETTINGS[setting].get("resident_decode"))
    assert counts[EnginePath.RECOMPUTED] > 0 or "hardly any room" not in setting


def test_kernels_choose_among_what_is_allowed(device: str) -> None:
    """Where all are greedy, the kernels that end a step read what guides left of the logits."""
    config = {"attention_backend": "triton", "fused_model": True, "max_batch_size": 2}
    llm = engine(device, resident_decode=True, run_ahead=2, **config)
    params = [SamplingParams(guide=FORMS["words"].guide), SamplingParams(max_new_tokens=3)]
    found = together(llm, [[1, 2, 3], [4]], params)
    want = together(engine(device, resident_decode=False), [[1, 2, 3], [4]], params)
    assert [each.token_ids for each in found] == [each.token_ids for each in want]
    counts = llm.engine.path_counts
    assert counts[EnginePath.FUSED_ARGMAX] >= counts[EnginePath.GUIDED] > 0


@pytest.mark.parametrize("resident", [False, True])
def test_texts_with_guides_are_not_drafted(device: str, resident: bool) -> None:
    """However often they repeat themselves; others beside them are."""
    guided = SamplingParams(guide=Guide(regex="((ab){3}c){12}"), max_new_tokens=70)
    free = SamplingParams(max_new_tokens=70, ignore_eos=True)
    texts = []
    for speculation in ("ngram", None):
        config: dict[str, Any] = {"resident_decode": resident, "speculation": speculation}
        llm = repeating_llm(device, tokenizer=byte_tokenizer(), **config)
        alone = [together(llm, [[1, 2]], [each])[0].token_ids for each in (guided, free)]
        drafts = drafted(llm)[0]
        assert bool(drafts) == (speculation is not None)
        both = [each.token_ids for each in together(llm, [[1, 2], [1, 2]], [guided, free])]
        assert both == alone
        in_all = drafted(llm)[0]
        assert in_all <= 2.5 * drafts  # of the free text, which other steps are drafted in
        together(llm, [[1, 2]], [guided])
        assert drafted(llm)[0] == in_all
        texts.append(both)
    assert texts[0] == texts[1]
    assert bytes(texts[0][0]) == b"abababc" * 10


def test_steps_without_guides_run_ahead_again(device: str) -> None:
    """Steps wait while somebody has a guide, and do nothing of it when nobody has one any more."""
    llm = engine(device, resident_decode=True, run_ahead=2)
    long = SamplingParams(max_new_tokens=60, ignore_eos=True)
    (want,) = together(llm, [[1, 2, 3]], [long])
    counts = llm.engine.path_counts
    ahead = counts[EnginePath.RUN_AHEAD]
    short = drawn_params(random.Random(0), FORMS["words"])
    found, word = together(llm, [[1, 2, 3], [7]], [long, short])
    assert found.token_ids == want.token_ids
    assert FORMS["words"].judge(str(word.text))
    guided = counts[EnginePath.GUIDED]
    assert 0 < guided < 20
    assert ahead - 20 < counts[EnginePath.RUN_AHEAD] - ahead < ahead
    together(llm, [[1, 2, 3]], [long])
    assert counts[EnginePath.GUIDED] == guided


def test_a_slot_that_a_guide_left_allows_everything_again(device: str) -> None:
    """The next text there comes while another guide is followed, so that bits are looked at."""
    llm = engine(device, resident_decode=True, max_batch_size=2)
    rng = random.Random(3)
    free = SamplingParams(max_new_tokens=30, ignore_eos=True)
    long = SamplingParams(max_new_tokens=200, guide=FORMS["an object"].guide, ignore_eos=True)
    word = drawn_params(rng, FORMS["words"])
    prompts = [[1], [2], [3]]
    outputs = together(llm, prompts, [long, word, free])
    (want,) = together(engine(device, resident_decode=False), [[3]], [free])
    assert outputs[2].token_ids == want.token_ids


@pytest.mark.parametrize("setting", ["without slots", "in slots"])
def test_a_text_goes_on_after_it_was_paused(device: str, setting: str) -> None:
    llm = engine(device, **SETTINGS[setting])
    own = drawn_params(random.Random(2), FORMS["a schema"], temperature=1.0)
    (want,) = together(llm, [[4, 5]], [own])
    request = llm.engine.submit([4, 5], own)
    steps: dict[int, Any] = {3: llm.engine.pause, 6: llm.engine.resume}
    for step in range(200):
        if step in steps:
            steps[step](request)
        llm.engine.step()
    assert request.token_ids == want.token_ids
