"""``LLM.generate``: completions, and errors of requests and settings."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from roseinfer import (
    LLM,
    BadArgument,
    ConfigError,
    EnginePath,
    NoDistribution,
    RequestTooLarge,
    SamplingParams,
    UnsupportedModel,
    tiny_gpt2,
)
from roseinfer.attention import triton as triton_attention
from roseinfer.models import loading
from tests.engine.continuations import (
    TEXTS,
    greedy,
    one,
    original,
    small_llm,
    text_of,
    transformers_continuation,
)
from tests.engine.test_random_mixes import assert_no_block_is_lost

# --------------------------------------------------------------------------------- generate


def test_completions_match_transformers(device: str) -> None:
    llm = LLM(
        "tiny",
        device=device,
        dtype="float32",
        max_batch_size=64,
        block_size=64,
        kv_cache_tokens=None,
        prefix_cache=True,
    )
    params = SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=None,
        max_new_tokens=16,
        stop=(),
        ignore_eos=False,
    )
    outputs = llm.generate(TEXTS, params, progress=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        expected_tokens = transformers_continuation(device, text, 16)
        assert output.prompt == text
        assert output.token_ids == expected_tokens
        assert output.text == text_of(device, expected_tokens)
        assert output.finish_reason == "length"
        assert output.error is None
    assert_no_block_is_lost(llm)


def test_token_ids_and_text_give_the_same_completion(device: str) -> None:
    llm = small_llm(device)
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    by_text = llm.generate(TEXTS, greedy(), progress=False)
    by_ids = llm.generate(ids, greedy(), progress=False)
    mixed = llm.generate([TEXTS[0], *ids[1:]], greedy(), progress=False)
    tokens = [output.token_ids for output in by_text]
    assert [output.token_ids for output in by_ids] == tokens
    assert [output.token_ids for output in mixed] == tokens
    assert [output.text for output in by_ids] == [output.text for output in by_text]


def test_outputs_are_in_the_order_of_prompts(device: str) -> None:
    llm = small_llm(device, max_batch_size=2)
    lengths = [9, 1, 5, 2, 7]
    outputs = llm.generate(TEXTS, [greedy(length) for length in lengths], progress=False)
    assert [output.prompt for output in outputs] == TEXTS
    assert [len(output.token_ids) for output in outputs] == lengths
    for text, length, output in zip(TEXTS, lengths, outputs, strict=True):
        assert output.token_ids == transformers_continuation(device, text, length)


@pytest.mark.parametrize("prompt", ["Once", [79, 110, 99, 101]], ids=["text", "token ids"])
def test_single_prompt_gives_one_output(device: str, prompt: Any) -> None:
    (output,) = small_llm(device).generate(prompt, greedy(4), progress=False)
    assert output.token_ids == transformers_continuation(device, "Once", 4)


def test_no_prompts_give_no_outputs(device: str) -> None:
    assert small_llm(device).generate([], progress=False) == []


def test_same_prompt_many_times(device: str) -> None:
    llm = small_llm(device, kv_cache_tokens=64)
    outputs = llm.generate([TEXTS[0]] * 12, greedy(6), progress=False)
    assert [output.token_ids for output in outputs] == [
        transformers_continuation(device, TEXTS[0], 6)
    ] * 12
    assert_no_block_is_lost(llm)


def test_wrong_number_of_parameters_is_rejected(device: str) -> None:
    llm = small_llm(device)
    with pytest.raises(BadArgument, match="2 sampling parameters for 3 prompts"):
        llm.generate(["a", "b", "c"], [greedy(), greedy()], progress=False)
    assert not llm.engine.has_work


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_if_requested(
    device: str, progress: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = small_llm(device)
    capsys.readouterr()
    llm.generate(["a", "b", ""], greedy(1), progress=progress)
    stderr = "generating: 0 of 3 requests\n" if progress else ""
    assert capsys.readouterr().err == stderr


def test_loaded_model_is_accepted(device: str) -> None:
    model = tiny_gpt2()
    llm = small_llm(device, model.model, tokenizer=model.tokenizer)
    assert one(llm, TEXTS[0], greedy()).text == text_of(
        device, transformers_continuation(device, TEXTS[0], 16)
    )


def test_half_precision_chooses_a_top_token(device: str) -> None:
    """Logits in bfloat16 are rounded to about a twentieth, in different ways."""
    llm = LLM("tiny", device=device, dtype="bfloat16", kv_cache_tokens=128)
    assert llm.engine.sequence_runner.kv.keys.dtype == torch.bfloat16
    with torch.no_grad():
        row = torch.tensor([llm.tokenizer.encode(TEXTS[0])], device=device)
        logits = original(device).model(row).logits[0, -1]
    top_tokens = (logits > logits.max() - 1).nonzero()[:, 0].tolist()
    assert len(top_tokens) < 10
    (token,) = one(llm, TEXTS[0], greedy(1)).token_ids
    assert token in top_tokens


# -------------------------------------------------------------------------------- memory


def test_prompt_as_large_as_the_cache_with_a_cached_prefix(device: str) -> None:
    """The prefix ends within a block.

    Keeping it and appending to it takes one block more than the cache has.
    """
    llm = small_llm(device, kv_cache_tokens=8)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    one(llm, prompt[:6], greedy(1, ignore_eos=True))
    output = one(llm, prompt, greedy(1, ignore_eos=True))
    assert output.token_ids == transformers_continuation(device, prompt, 1)
    assert_no_block_is_lost(llm)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_match_transformers(device: str, prefix_cache: bool) -> None:
    llm = small_llm(device, kv_cache_tokens=48, prefix_cache=prefix_cache)
    prompts = [TEXTS[0] + letter for letter in "abcdef"]
    outputs = llm.generate(prompts, greedy(20, ignore_eos=True), progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == transformers_continuation(device, prompt, 20)
        assert output.text == text_of(device, output.token_ids)
    assert llm.engine.path_counts[EnginePath.RECOMPUTED] > 0
    assert_no_block_is_lost(llm)


def test_largest_request_is_served_and_a_larger_one_is_rejected(device: str) -> None:
    """The last token is never stored: 8 blocks of 4 hold 32 tokens, and the request has 33."""
    llm = small_llm(device, kv_cache_tokens=32)
    fitting, too_large = llm.generate(
        [[1] * 20, [1] * 20], [greedy(13, ignore_eos=True), greedy(14)], progress=False
    )
    assert fitting.token_ids == transformers_continuation(device, [1] * 20, 13)
    assert too_large.finish_reason == "error"
    assert too_large.error is not None
    assert re.search(
        "20 tokens and 14 new ones take 9 blocks of 4 tokens, and the KV cache has 8",
        too_large.error,
    )


def test_max_length_ends_a_request(device: str) -> None:
    llm = small_llm(device, max_length=20)
    output = one(llm, [1] * 17, greedy(16, ignore_eos=True))
    assert output.token_ids == transformers_continuation(device, [1] * 17, 3)
    assert output.finish_reason == "length"


# --------------------------------------------------------------------- errors of one request


BAD_PROMPTS = {
    "empty text": ("", "an empty prompt"),
    "no ids": ([], "an empty prompt"),
    "too long": ([1] * 1025, "a prompt of 1025 tokens for a model of 1024 positions"),
    "no room": ([1] * 1024, "a prompt of 1024 tokens leaves no room for a new one"),
    "too large": ([1] * 500, "a prompt of 500 tokens and 16 new ones take 129 blocks"),
    "unknown": ([1, 257], "token ids must lie in 0..256"),
    "negative": ([-1], "token ids must lie in 0..256"),
    "fraction": ([1, 1.5], "token ids"),
    "words": (["Once", "upon"], "token ids"),
    "nothing": (None, "prompt"),
    "a number": (5, "prompt"),
    "half a character": ("a\ud800", "prompt"),
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(("bad", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompt_fails_alone_with_its_reason(
    device: str, bad: Any, message: str, at: int
) -> None:
    llm = small_llm(device)
    prompts: list[Any] = [TEXTS[0], TEXTS[1]]
    prompts.insert(at, bad)
    outputs = llm.generate(prompts, greedy(), progress=False)
    rejected = outputs.pop(at)
    assert rejected.prompt == bad
    assert (rejected.token_ids, rejected.text, rejected.finish_reason) == ([], None, "error")
    assert rejected.error is not None
    assert message in rejected.error
    for text, output in zip(TEXTS, outputs, strict=False):
        assert output.token_ids == transformers_continuation(device, text, 16)
    assert_no_block_is_lost(llm)


def llm_with_nan_tokens(device: str, *tokens: int) -> LLM:
    """Build a model in which every token that attends to one of these gets NaN."""
    model = tiny_gpt2(device)
    model.model.transformer.wte.weight[list(tokens)] = float("nan")
    return small_llm(device, model.model, tokenizer=model.tokenizer)


@pytest.mark.parametrize("sampled", [False, True])
def test_nan_logits_end_only_their_request(device: str, sampled: bool) -> None:
    llm = llm_with_nan_tokens(device, ord("#"))
    prompts = [TEXTS[0], TEXTS[0] + "#", "####", TEXTS[1]]
    params = [
        greedy(8),
        SamplingParams(1.0, seed=1) if sampled else greedy(8),
        greedy(8),
        greedy(8),
    ]
    for _ in range(2):  # the blocks of the first round must not affect the second
        outputs = llm.generate(prompts, params, progress=False)
        ends = [output.finish_reason for output in outputs]
        assert ends == ["length", "error", "error", "length"]
        for broken in outputs[1:3]:
            assert broken.token_ids == []
            assert broken.error is not None
            assert "NaN" in broken.error
        assert outputs[0].token_ids == transformers_continuation(device, TEXTS[0], 8)
        assert outputs[3].token_ids == transformers_continuation(device, TEXTS[1], 8)
    assert_no_block_is_lost(llm)


def test_tokens_before_nan_logits_are_returned(device: str) -> None:
    tokens = transformers_continuation(device, TEXTS[0], 8)
    nan_position = next(at for at in range(2, 8) if tokens[at] not in tokens[:at])
    llm = llm_with_nan_tokens(device, tokens[nan_position])
    output = one(llm, TEXTS[0], greedy(8))
    assert output.finish_reason == "error"
    assert output.token_ids == tokens[: nan_position + 1]
    assert output.text == text_of(device, output.token_ids)


def test_stream_raises_the_error_of_its_request(device: str) -> None:
    llm = llm_with_nan_tokens(device, ord("#"))
    with pytest.raises(NoDistribution, match="NaN"):
        list(llm.stream("a#", greedy()))
    with pytest.raises(RequestTooLarge, match="leaves no room"):
        next(llm.stream([1] * 1024))
    assert_no_block_is_lost(llm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "abacus"}, "device 'abacus': the engine runs on cpu, cuda"),
        ({"device": "meta"}, "device 'meta': the engine runs on cpu, cuda"),
        ({"device": "cpu:7"}, "device 'cpu:7'"),
        ({"dtype": "int8"}, "dtype 'int8': it must be one of float32, float16, bfloat16"),
        ({"dtype": "torch.float32"}, "dtype 'torch.float32'"),
        (
            {"max_batch_size": 0},
            "max_batch_size must be a whole number of at least 1 and at most 1048576, not 0",
        ),
        ({"block_size": 2.5}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens"),
        ({"max_length": -1}, "max_length"),
        ({"prefill_max_tokens": 0}, "prefill_max_tokens"),
        ({"prefill_max_batch_size": 0}, "prefill_max_batch_size"),
        ({"prefill_admission_policy": "lifo"}, "must be 'fifo' or 'pack'"),
        ({"cuda_graph": True, "device": "cpu"}, "cuda_graph=True: cpu has no CUDA graphs"),
    ],
    ids=str,
)
@pytest.mark.parametrize("loaded", [False, True], ids=["by name", "loaded"])
def test_invalid_settings_are_rejected(
    settings: dict[str, Any], message: str, loaded: bool
) -> None:
    model = tiny_gpt2().model if loaded else "tiny"
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(model, **{"device": "cpu", "dtype": "float32"} | settings)


@pytest.mark.parametrize("name", ["paged_attention", "fused_model"])
def test_kernels_are_rejected_if_they_cannot_run(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (loading, triton_attention):
        monkeypatch.setattr(module, "unusable_reason", lambda _: "there is no Triton")
    with pytest.raises(ConfigError, match=f"{name}=True: there is no Triton"):
        small_llm(device, **{name: True})
    small_llm(device, **{name: False})


@pytest.mark.parametrize("prompts", [None, 3])
def test_values_that_are_not_prompts_are_rejected(device: str, prompts: Any) -> None:
    with pytest.raises(BadArgument, match=f"not {prompts}"):
        small_llm(device).generate(prompts)


def test_params_of_a_wrong_type_are_rejected(device: str) -> None:
    llm = small_llm(device)
    mapping: Any = {"temperature": 1}
    with pytest.raises(BadArgument, match="params must be SamplingParams, or a list of them"):
        llm.generate("a", mapping)
    (output,) = llm.generate("a", [mapping])
    assert output.error == "params must be SamplingParams, not {'temperature': 1}"
    with pytest.raises(BadArgument, match="SamplingParams"):
        next(llm.stream("a", mapping))


def test_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU here; device='cpu' works"):
        LLM("tiny", device="cuda")


def test_max_length_beyond_the_positions_of_the_model_is_rejected(device: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"max_length=1025: .* has 1024 positions"):
        small_llm(device, max_length=1025)
