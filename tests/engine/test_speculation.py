"""With speculation every request gets the tokens that it gets without, in fewer steps."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM, BadArgument, ConfigError, EngineConfig, EnginePath, SamplingParams
from tests.engine.repeating_models import drafted, repeating_llm
from tests.engine.test_interrupted_steps import Mishap
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.engine.test_run_ahead import greedy
from tests.models.families import CONFIGS, VOCABULARY, tiny

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer import RequestOutput

PROMPTS = [[7, 3, 90, 12] * 3, [1], [4, 4, 8, 20, 4, 4, 8], list(range(11)), [5, 5, 5]]
SETTINGS: dict[str, dict[str, Any]] = {
    "without slots": {"resident_decode": False},
    "in slots": {"resident_decode": True, "run_ahead": 2},
    "far ahead": {"resident_decode": True, "run_ahead": 4, "prefix_cache": False},
    "a list for every layer": {"per_layer_kv": True, "resident_decode": False},
    "in chunks": {"prefill_max_tokens": 3, "resident_decode": False},
    "two at once": {"max_batch_size": 2, "resident_decode": True, "run_ahead": 1},
    "hardly any room": {"kv_cache_tokens": 68, "resident_decode": False},
    "hardly any room in slots": {"kv_cache_tokens": 68, "resident_decode": True},
}
CHOICES: dict[str, SamplingParams] = {
    "greedy": greedy(48, ignore_eos=True),
    "drawn": SamplingParams(max_new_tokens=48, temperature=1.0, top_k=3, seed=5),
    "told": greedy(40, top_logprobs=2, prompt_logprobs=True),
    "penalised": greedy(30, presence_penalty=0.5),
}


def engine(family: str, device: str, **config: Any) -> LLM:
    settings = {"block_size": 4, "kv_cache_tokens": 600} | config
    llm = LLM(tiny(family, device), device=device, dtype="float32", **settings)
    kv = llm.engine.sequence_runner.kv
    for cache_ in (kv.keys, kv.values):
        cache_.fill_(float("nan"))
    return llm


@cache
def expected(family: str, device: str, choice: str) -> list[RequestOutput]:
    plain = engine(family, device, resident_decode=False)
    return [plain.generate([each], CHOICES[choice], progress=False)[0] for each in PROMPTS]


@pytest.mark.parametrize(("family", "seed"), [("gpt2", 3), ("gpt2", 9), ("gemma2", 1)])
def test_who_leaves_a_slot_in_a_full_cache_has_a_block(family: str, seed: int, device: str) -> None:
    """A block that was given early is given up with the slot, so the step counts it again."""
    rng = Random(seed)
    stem = [rng.randrange(VOCABULARY) for _ in range(60)]
    prompts, choices = [], []
    for _ in range(14):
        length = rng.choice((1, 5, 17, 40, 63))
        begins = rng.choice((0, length // 2, length - 1))
        rest = [rng.randrange(VOCABULARY) for _ in range(rng.choice((3, length)))]
        prompts.append((stem[:begins] + rest * length)[:length])
        choices.append(greedy(rng.randrange(4, 90 - length), ignore_eos=True))
    crowded = {"kv_cache_tokens": 320, "max_batch_size": 5, "prompt_rows": 64}
    options = {**crowded, "resident_decode": True, "run_ahead": 0}
    llm = engine(family, device, speculation="ngram", **options)
    found = llm.generate(prompts, choices, progress=False)
    plain = engine(family, device, resident_decode=False)
    assert_alike(found, plain.generate(prompts, choices, progress=False))
    assert llm.engine.path_counts[EnginePath.DRAFT_VERIFICATION] > 5
    assert_no_block_is_lost(llm)


def assert_alike(outputs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for one, other in zip(outputs, wanted, strict=True):
        assert one.error is None
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        if one.prompt_logprobs is not None and other.prompt_logprobs is not None:
            assert one.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-3)


@pytest.mark.many_alike
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("choice", CHOICES)
def test_texts_are_the_same(device: str, settings: str, choice: str) -> None:
    llm = engine("gpt2", device, speculation="ngram", **SETTINGS[settings])
    outputs = llm.generate(PROMPTS, CHOICES[choice], progress=False)
    assert_alike(outputs, expected("gpt2", device, choice))
    assert_no_block_is_lost(llm)
    drafts, accepted, _ = drafted(llm)
    if choice == "penalised":
        assert not drafts
    elif choice == "greedy":
        assert accepted


@pytest.mark.many_alike
@pytest.mark.parametrize("family", [each for each in CONFIGS if each != "gpt2"])
@pytest.mark.parametrize("settings", ["without slots", "in slots"])
def test_texts_of_every_family_are_the_same(device: str, family: str, settings: str) -> None:
    llm = engine(family, device, speculation="ngram", **SETTINGS[settings])
    outputs = llm.generate(PROMPTS, CHOICES["greedy"], progress=False)
    assert_alike(outputs, expected(family, device, "greedy"))
    assert_no_block_is_lost(llm)


def steps_of(llm: LLM, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> int:
    for prompt in prompts:
        llm.engine.submit(prompt, params)
    steps = 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("resident", [False, True])
def test_a_text_that_repeats_itself_takes_fewer_steps_than_tokens(
    device: str, resident: bool
) -> None:
    llm = repeating_llm(device, speculation="ngram", resident_decode=resident, cuda_graph=False)
    steps = steps_of(llm, greedy(200, ignore_eos=True), [[7, 3, 90, 12]])
    assert steps / 200 < 0.67
    assert drafted(llm)[1] > 100


@pytest.mark.parametrize("resident", [False, True])
def test_a_text_that_does_not_repeat_itself_is_hardly_drafted(device: str, resident: bool) -> None:
    config = {"speculation": "ngram", "resident_decode": resident}
    llm = LLM("tiny", device=device, dtype="float32", **config)
    params = SamplingParams(max_new_tokens=500, temperature=1.0, seed=3, ignore_eos=True)
    steps_of(llm, params, [[7, 3, 90, 12]])
    assert drafted(llm)[0] < 50


def test_who_leaves_a_slot_comes_back_when_drafts_are_refused(device: str) -> None:
    """Drawn from two tokens, a text goes round for a while."""
    config = {"resident_decode": True, "run_ahead": 2, "cuda_graph": False}
    llm = repeating_llm(device, speculation="ngram", **config)
    plain = repeating_llm(device, **config)
    params = [
        greedy(100, ignore_eos=True),
        SamplingParams(max_new_tokens=200, temperature=0.3, top_k=2, seed=2, ignore_eos=True),
        SamplingParams(max_new_tokens=200, temperature=0.3, top_k=2, seed=1, ignore_eos=True),
    ]
    prompts = [[7, 3], [9], [1, 1, 1]]
    outputs = llm.generate(prompts, params, progress=False)
    assert_alike(outputs, plain.generate(prompts, params, progress=False))
    _, accepted, refused = drafted(llm)
    assert accepted > 50
    assert refused
    assert llm.engine.path_counts[EnginePath.RESIDENT] > 20
    assert llm.engine._runner._resident is not None
    assert llm.engine._runner._resident.slots.rows_in_use == 0


@pytest.mark.parametrize("count", range(1, 12))
def test_a_request_gets_as_many_tokens_as_it_asks_for(device: str, count: int) -> None:
    prompt = [4, 4, 4, 4]
    text = repeating_llm(device).generate([prompt], greedy(30, ignore_eos=True), progress=False)
    prompt = text[0].token_ids  # it goes round by now
    llm = repeating_llm(device, speculation="ngram", resident_decode=False)
    (output,) = llm.generate([prompt], greedy(count, ignore_eos=True), progress=False)
    (plain,) = repeating_llm(device).generate(
        [prompt], greedy(count, ignore_eos=True), progress=False
    )
    assert output.token_ids == plain.token_ids
    assert len(output.token_ids) == count


def test_a_stop_string_within_accepted_drafts_ends_the_text(device: str) -> None:
    from roseinfer.models.tiny import byte_tokenizer

    tokenizer = byte_tokenizer()
    prompt = repeating_llm(device).generate([[65]], greedy(60, ignore_eos=True), progress=False)
    ids = prompt[0].token_ids
    outputs = []
    for speculation in (None, "ngram"):
        llm = repeating_llm(device, speculation=speculation, tokenizer=tokenizer)
        whole = llm.generate([ids], greedy(20, ignore_eos=True), progress=False)[0].text
        assert whole is not None
        params = greedy(20, ignore_eos=True, stop=(whole[5:7],))
        outputs += llm.generate([ids], params, progress=False)
        assert_no_block_is_lost(llm)
    assert outputs[0] == outputs[1]
    assert outputs[0].finish_reason == "stop"
    assert drafted(llm)[1]


@pytest.mark.many_alike
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("what", ["cancel", "pause"])
def test_requests_end_and_pause_between_steps_of_drafts(
    device: str, resident: bool, what: str
) -> None:
    config = {"resident_decode": resident, "run_ahead": 2 * resident, "cuda_graph": False}
    plain = repeating_llm(device, **config)
    wanted = plain.generate([[7, 3]] * 2, greedy(60, ignore_eos=True), progress=False)
    for moment in range(2, 30, 3):
        llm = repeating_llm(device, speculation="ngram", **config)
        requests = [llm.engine.submit([7, 3], greedy(60, ignore_eos=True)) for _ in range(2)]
        for step in range(200):
            if step == moment:
                getattr(llm.engine, what)(requests[0])
            if step == moment + 6 and what == "pause":
                llm.engine.resume(requests[0])
            llm.engine.step()
        assert not llm.engine.has_work
        for request in requests:
            count = request.num_generated
            assert request.token_ids == wanted[0].token_ids[:count]
            assert count == 60 or request.finish_reason == "cancelled"
        assert_no_block_is_lost(llm)


@pytest.mark.parametrize("resident", [False, True])
def test_a_step_that_breaks_off_leaves_no_draft_behind(
    device: str, resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"resident_decode": resident, "cuda_graph": False}
    wanted = repeating_llm(device).generate([[7, 3]], greedy(60, ignore_eos=True), progress=False)
    for name in ("logits", "on_drafts_verified"):
        llm = repeating_llm(device, speculation="ngram", **config)
        runner = llm.engine._runner
        owner: Any = llm.engine.sequence_runner.model if name == "logits" else runner
        monkeypatch.setattr(owner, name, now_and_then(getattr(owner, name)))
        request = llm.engine.submit([7, 3], greedy(60, ignore_eos=True))
        for _ in range(300):
            try:
                llm.engine.step()
            except Mishap:
                continue
        assert request.token_ids == wanted[0].token_ids
        assert_no_block_is_lost(llm)


def now_and_then(real: Callable[..., Any]) -> Callable[..., Any]:
    """``real``, except that every fifth call breaks off when its work is done.

    Steps in flight are lost with it: if more broke off, none would land where steps run ahead.
    """
    calls = iter(range(1, 10000))

    def sometimes(*args: Any, **named: Any) -> Any:
        result = real(*args, **named)
        if next(calls) % 5 == 0:
            raise Mishap
        return result

    return sometimes


def test_a_session_with_drafts_stores_all_that_it_has(device: str) -> None:
    runner = engine("gpt2", device).engine.sequence_runner
    (session,), _ = runner.prefill([[1, 2, 3]])
    session.token_ids += [4, 5]
    with pytest.raises(BadArgument, match="sequence 0: it has 4 tokens to store, not 3"):
        runner.extend([session], [3], drafts={0: [6, 7]})
    logits = runner.extend([session], drafts={0: [6, 7]}, with_all_logits={0})
    assert logits.shape == (4, VOCABULARY)
    assert session.num_stored == 7
    assert session.token_ids == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("wrong", ["medusa", "", 3, True])
def test_other_speculation_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="speculation"):
        EngineConfig(speculation=wrong)
