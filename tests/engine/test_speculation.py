"""Speculative decoding: the same tokens as without it, in fewer steps."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM, ConfigError, EngineConfig, EnginePath, SamplingParams
from roseinfer.decode.step import TokenSpan
from roseinfer.engine.drafter import MAX_DRAFT_TOKENS
from roseinfer.engine.speculation import Speculation
from roseinfer.kv.sequence import reserve
from tests.engine.repeating_models import draft_counts, repeating_llm
from tests.engine.test_interrupted_steps import StepFault
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.engine.test_run_ahead import greedy
from tests.models.families import CONFIGS, VOCABULARY, tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer import RequestOutput
    from roseinfer.engine.request import Request

PROMPTS = [[7, 3, 90, 12] * 3, [1], [4, 4, 8, 20, 4, 4, 8], list(range(11)), [5, 5, 5]]
SETTINGS: dict[str, dict[str, Any]] = {
    "no slots": {"resident_decode": False},
    "slots": {"resident_decode": True, "run_ahead": 2},
    "far ahead": {"resident_decode": True, "run_ahead": 4, "prefix_cache": False},
    "per-layer blocks": {"per_layer_kv": True, "resident_decode": False},
    "chunks": {"prefill_max_tokens": 3, "resident_decode": False},
    "batch of two": {"max_batch_size": 2, "resident_decode": True, "run_ahead": 1},
    "few blocks": {"kv_cache_tokens": 68, "resident_decode": False},
    "few blocks and slots": {"kv_cache_tokens": 68, "resident_decode": True},
}
CHOICES: dict[str, SamplingParams] = {
    "greedy": greedy(48, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=48, temperature=1.0, top_k=3, seed=5),
    "logprobs": greedy(40, top_logprobs=2, prompt_logprobs=True),
    "penalties": greedy(30, presence_penalty=0.5),
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


@pytest.mark.sampled_cases
@pytest.mark.parametrize(("family", "seed"), [("gpt2", 3), ("gpt2", 9), ("gemma2", 1)])
def test_request_leaving_its_slot_in_a_full_cache_gets_a_block(
    family: str, seed: int, device: str
) -> None:
    """An early block is freed with the slot, so the step counts it again."""
    rng = Random(seed)
    stem = [rng.randrange(VOCABULARY) for _ in range(60)]
    prompts, choices = [], []
    for _ in range(14):
        length = rng.choice((1, 5, 17, 40, 63))
        num_shared = rng.choice((0, length // 2, length - 1))
        suffix = [rng.randrange(VOCABULARY) for _ in range(rng.choice((3, length)))]
        prompts.append((stem[:num_shared] + suffix * length)[:length])
        choices.append(greedy(rng.randrange(4, 90 - length), ignore_eos=True))
    few_blocks = {"kv_cache_tokens": 320, "max_batch_size": 5, "prompt_rows": 64}
    options = {**few_blocks, "resident_decode": True, "run_ahead": 0}
    llm = engine(family, device, speculation="ngram", **options)
    outputs = llm.generate(prompts, choices, progress=False)
    plain = engine(family, device, resident_decode=False)
    assert_outputs_equal(outputs, plain.generate(prompts, choices, progress=False))
    assert llm.engine.path_counts[EnginePath.DRAFT_VERIFICATION] > 5
    assert_no_block_is_lost(llm)


def test_block_of_a_request_that_leaves_its_slot_is_counted_once(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without room has its next block counted already; one with an early block has not."""
    options = {"resident_decode": True, "run_ahead": 0, "prefix_cache": False}
    llm = engine("gpt2", device, speculation="ngram", **options)
    monkeypatch.setattr(llm.engine._runner, "_early_blocks", lambda *_: 0)
    assert llm.engine.speculation is not None
    request = llm.engine.submit([7, 3], greedy(40, ignore_eos=True))
    sequence, kv = request.sequence, llm.engine.sequence_runner.kv
    while request.resident is None or sequence.num_stored < sequence.token_capacity:
        assert not request.finish_reason
        llm.engine.step()
    assert llm.engine.speculation._leave_slot(request) == 0
    reserve(kv, [sequence], [kv.block_size])
    assert llm.engine.speculation._leave_slot(request) == 1


def assert_outputs_equal(
    outputs: list[RequestOutput], expected_outputs: list[RequestOutput]
) -> None:
    for one, other in zip(outputs, expected_outputs, strict=True):
        assert one.error is None
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        if one.prompt_logprobs is not None and other.prompt_logprobs is not None:
            assert one.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-3)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("choice", CHOICES)
def test_completions_are_the_same(device: str, settings: str, choice: str) -> None:
    llm = engine("gpt2", device, speculation="ngram", **SETTINGS[settings])
    outputs = llm.generate(PROMPTS, CHOICES[choice], progress=False)
    assert_outputs_equal(outputs, expected("gpt2", device, choice))
    assert_no_block_is_lost(llm)
    drafts, accepted, _ = draft_counts(llm)
    if choice == "penalties":
        assert not drafts
    elif choice == "greedy":
        assert accepted


@pytest.mark.sampled_cases
@pytest.mark.parametrize("family", [each for each in CONFIGS if each != "gpt2"])
@pytest.mark.parametrize("settings", ["no slots", "slots"])
def test_completions_of_every_family_are_the_same(device: str, family: str, settings: str) -> None:
    llm = engine(family, device, speculation="ngram", **SETTINGS[settings])
    outputs = llm.generate(PROMPTS, CHOICES["greedy"], progress=False)
    assert_outputs_equal(outputs, expected(family, device, "greedy"))
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
def test_repetitive_completion_takes_fewer_steps_than_tokens(device: str, resident: bool) -> None:
    llm = repeating_llm(device, speculation="ngram", resident_decode=resident, cuda_graph=False)
    steps = steps_of(llm, greedy(200, ignore_eos=True), [[7, 3, 90, 12]])
    assert steps / 200 < 0.67
    assert draft_counts(llm)[1] > 100


@pytest.mark.parametrize("resident", [False, True])
def test_figures_of_drafts_are_those_of_their_verifications(
    device: str, resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[tuple[int, int]] = []
    record = Speculation.record_verification

    def recorded(
        speculation: Speculation, request: Request, drafts: Sequence[int], accepted: int
    ) -> None:
        verified.append((len(drafts), accepted))
        record(speculation, request, drafts, accepted)

    monkeypatch.setattr(Speculation, "record_verification", recorded)
    llm = repeating_llm(device, speculation="ngram", resident_decode=resident, cuda_graph=False)
    steps_of(llm, greedy(60, ignore_eos=True), [[7, 3, 90, 12], [5, 6]])
    figures = llm.engine.speculation
    assert figures is not None
    assert len(verified) > 2
    assert figures.num_drafts == len(verified)
    assert figures.num_draft_tokens == sum(drafted for drafted, _ in verified)
    assert figures.num_accepted_per_position == [
        sum(accepted > position for _, accepted in verified) for position in range(MAX_DRAFT_TOKENS)
    ]


def test_last_draft_ends_where_the_completion_must(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step adds a token after the drafts that it accepts."""
    ends: list[int] = []
    record = Speculation.record_verification

    def recorded(
        speculation: Speculation, request: Request, drafts: Sequence[int], accepted: int
    ) -> None:
        ends.append(len(request.sequence.token_ids) + len(drafts) + 1)
        record(speculation, request, drafts, accepted)

    monkeypatch.setattr(Speculation, "record_verification", recorded)
    llm = repeating_llm(device, speculation="ngram", resident_decode=False)
    steps_of(llm, greedy(60, ignore_eos=True), [[7, 3, 90, 12]])
    assert max(ends) == 64


@pytest.mark.slow
@pytest.mark.parametrize("resident", [False, True])
def test_completion_without_repetition_has_few_drafts(device: str, resident: bool) -> None:
    config = {"speculation": "ngram", "resident_decode": resident}
    llm = LLM("tiny", device=device, dtype="float32", **config)
    params = SamplingParams(max_new_tokens=500, temperature=1.0, seed=3, ignore_eos=True)
    steps_of(llm, params, [[7, 3, 90, 12]])
    assert draft_counts(llm)[0] < 50


@pytest.mark.slow
def test_request_returns_to_a_slot_when_drafts_are_rejected(device: str) -> None:
    """Sampled from two tokens, a completion is periodic for a while."""
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
    assert_outputs_equal(outputs, plain.generate(prompts, params, progress=False))
    _, accepted, rejected = draft_counts(llm)
    assert accepted > 50
    assert rejected
    assert llm.engine.path_counts[EnginePath.RESIDENT] > 20
    assert llm.engine._runner._resident is not None
    assert llm.engine._runner._resident.slots.rows_in_use == 0


@pytest.mark.sampled_cases
@pytest.mark.parametrize("count", range(1, 12))
def test_max_new_tokens_is_exact_with_drafts(device: str, count: int) -> None:
    prompt = [4, 4, 4, 4]
    text = repeating_llm(device).generate([prompt], greedy(30, ignore_eos=True), progress=False)
    prompt = text[0].token_ids  # periodic by now
    llm = repeating_llm(device, speculation="ngram", resident_decode=False)
    (output,) = llm.generate([prompt], greedy(count, ignore_eos=True), progress=False)
    (plain,) = repeating_llm(device).generate(
        [prompt], greedy(count, ignore_eos=True), progress=False
    )
    assert output.token_ids == plain.token_ids
    assert len(output.token_ids) == count


def test_stop_string_within_accepted_drafts_ends_the_completion(device: str) -> None:
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
    assert draft_counts(llm)[1]


@pytest.mark.sampled_cases
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("method", ["cancel", "pause"])
def test_requests_are_cancelled_and_paused_between_draft_steps(
    device: str, resident: bool, method: str
) -> None:
    config = {"resident_decode": resident, "run_ahead": 2 * resident, "cuda_graph": False}
    plain = repeating_llm(device, **config)
    expected_outputs = plain.generate([[7, 3]] * 2, greedy(60, ignore_eos=True), progress=False)
    for moment in range(2, 30, 3):
        llm = repeating_llm(device, speculation="ngram", **config)
        requests = [llm.engine.submit([7, 3], greedy(60, ignore_eos=True)) for _ in range(2)]
        for step in range(200):
            if step == moment:
                getattr(llm.engine, method)(requests[0])
            if step == moment + 6 and method == "pause":
                llm.engine.resume(requests[0])
            llm.engine.step()
        assert not llm.engine.has_work
        for request in requests:
            count = request.num_generated
            assert request.token_ids == expected_outputs[0].token_ids[:count]
            assert count == 60 or request.finish_reason == "cancelled"
        assert_no_block_is_lost(llm)


@pytest.mark.parametrize("resident", [False, True])
def test_interrupted_step_leaves_no_draft(
    device: str, resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"resident_decode": resident, "cuda_graph": False}
    expected_outputs = repeating_llm(device).generate(
        [[7, 3]], greedy(60, ignore_eos=True), progress=False
    )
    for name in ("logits", "on_drafts_verified"):
        llm = repeating_llm(device, speculation="ngram", **config)
        runner = llm.engine._runner
        owner: Any = llm.engine.sequence_runner.model if name == "logits" else runner
        monkeypatch.setattr(owner, name, fail_every_fifth_call(getattr(owner, name)))
        request = llm.engine.submit([7, 3], greedy(60, ignore_eos=True))
        for _ in range(300):
            try:
                llm.engine.step()
            except StepFault:
                continue
        assert request.token_ids == expected_outputs[0].token_ids
        assert_no_block_is_lost(llm)


def fail_every_fifth_call(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``real`` so that every fifth call raises after its work is done.

    Steps in flight are lost with it: if more failed, none would be read where steps run ahead.
    """
    calls = iter(range(1, 10000))

    def call_or_fail(*args: Any, **named: Any) -> Any:
        result = real(*args, **named)
        if next(calls) % 5 == 0:
            raise StepFault
        return result

    return call_or_fail


def test_sequence_with_drafts_stores_all_its_tokens(device: str) -> None:
    runner = engine("gpt2", device).engine.sequence_runner
    (session,), _ = runner.prefill([[1, 2, 3]])
    session.token_ids += [4, 5]
    logits = runner.forward([TokenSpan(session, [4, 5, 6, 7], all_logits=True)])
    assert logits.shape == (4, VOCABULARY)
    assert session.num_stored == 7
    assert session.token_ids == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("value", ["medusa", "", 3, True])
def test_unknown_speculation_is_rejected(value: Any) -> None:
    with pytest.raises(ConfigError, match="speculation"):
        EngineConfig(speculation=value)
