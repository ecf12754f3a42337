"""``roseinfer generate``: options and their effects."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, Guide, SamplingParams, tiny_gpt2
from roseinfer.config import EngineConfig
from tests.cli.generate.command_runs import TWELVE_TOKENS, Outcome, Run, completion_of

if TYPE_CHECKING:
    from pathlib import Path

SAMPLING = {
    "temperature": (["--temperature", "0.5"], {"temperature": 0.5}),
    "top_k": (["--top-k", "3"], {"top_k": 3, "temperature": 1.0}),
    "top_p": (["--top-p", "0.5"], {"top_p": 0.5, "temperature": 1.0}),
    "min_p": (["--min-p", "0.1"], {"min_p": 0.1, "temperature": 1.0}),
    "seed": (["--seed", "7"], {"seed": 7, "temperature": 1.0}),
    "seed_beside_temperature": (
        ["--seed", "7", "--temperature", "0"],
        {"seed": 7, "temperature": 0.0},
    ),
    "repetition_penalty": (["--repetition-penalty", "1.5"], {"repetition_penalty": 1.5}),
    "max_new_tokens": (["--max-new-tokens", "3"], {"max_new_tokens": 3}),
    "stop": (["--stop", "a", "--stop", "b"], {"stop": ("a", "b")}),
    "ignore_eos": (["--ignore-eos"], {"ignore_eos": True}),
    "guide": (["--guide", '{"choice": ["a", "b"]}'], {"guide": Guide(choice=("a", "b"))}),
    "logprobs": (["--logprobs"], {"logprobs": True}),
    "top_logprobs": (["--top-logprobs", "3"], {"top_logprobs": 3}),
    "prompt_logprobs": (["--prompt-logprobs"], {"prompt_logprobs": True}),
    "presence_penalty": (["--presence-penalty", "-1"], {"presence_penalty": -1}),
    "frequency_penalty": (["--frequency-penalty", "0.5"], {"frequency_penalty": 0.5}),
    "none": ([], {}),
}
ENGINE = {
    "max_batch_size": (["--max-batch-size", "3"], {"max_batch_size": 3}),
    "block_size": (["--block-size", "8"], {"block_size": 8}),
    "kv_cache_tokens": (["--kv-cache-tokens", "1000"], {"kv_cache_tokens": 1000}),
    "max_length": (["--max-length", "200"], {"max_length": 200}),
    "prefix_cache": (["--no-prefix-cache"], {"prefix_cache": False}),
    "prefill_admission_policy": (
        ["--prefill-admission-policy", "pack"],
        {"prefill_admission_policy": "pack"},
    ),
    "speculation": (["--speculation", "ngram"], {"speculation": "ngram"}),
    "none": ([], {}),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LLM, SamplingParams]]:
    """Engines and parameters of the calls of ``LLM.generate``."""
    recorded: list[tuple[LLM, SamplingParams]] = []
    generate = LLM.generate

    def recorded_generate(
        self: LLM, prompts: Any, params: SamplingParams, *, progress: bool
    ) -> Any:
        recorded.append((self, params))
        return generate(self, prompts, params, progress=progress)

    monkeypatch.setattr(LLM, "generate", recorded_generate)
    return recorded


@pytest.mark.sampled_cases
@pytest.mark.parametrize(("options", "changed"), SAMPLING.values(), ids=SAMPLING)
def test_sampling_option_sets_its_parameter(
    run: Run,
    calls: list[tuple[LLM, SamplingParams]],
    options: list[str],
    changed: dict[str, Any],
) -> None:
    assert run("--json", "--prompt", "x", *options).status == 0
    ((_, params),) = calls
    assert params == replace(SamplingParams(temperature=0, max_new_tokens=128), **changed)


@pytest.mark.parametrize(("options", "changed"), ENGINE.values(), ids=ENGINE)
def test_engine_option_sets_its_setting(
    run: Run,
    calls: list[tuple[LLM, SamplingParams]],
    options: list[str],
    changed: dict[str, Any],
) -> None:
    assert run("--json", "--prompt", "x", *TWELVE_TOKENS, *options).status == 0
    ((llm, _),) = calls
    assert llm.config == replace(EngineConfig(), **changed)


def test_every_sampling_parameter_has_an_option() -> None:
    assert SAMPLING.keys() >= {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ("x", ": it must be a JSON object, as in"),
        ("[]", ": it must be a JSON object, as in"),
        ('{"regexp": "a"}', ": unknown kind of guide; did you mean regex?"),
        ('{"zzz": "a"}', ": unknown kind of guide; use one of json_object, json_schema"),
        ("{}", ": a Guide has exactly one of"),
        ('{"choice": "a"}', ": Guide.choice is 'a'; it must be one or more texts"),
    ],
)
def test_invalid_guide_is_rejected(run: Run, guide: str, message: str) -> None:
    outcome = run("--prompt", "x", "--guide", guide)
    assert (outcome.status, outcome.out) == (2, "")
    assert f"roseinfer generate: --guide {guide!r}{message}" in outcome.err


def test_completion_follows_the_guide(run: Run) -> None:
    outcome = run("--prompt", "x", "--guide", '{"regex": "[0-9]{5}"}')
    assert outcome.status == 0
    assert outcome.out.strip().isdigit()


def test_device_and_dtype_are_applied(run: Run, calls: list[tuple[LLM, SamplingParams]]) -> None:
    options = ["--device", "cpu", "--dtype", "bfloat16"]
    assert run("--json", "--prompt", "x", *options, *TWELVE_TOKENS).status == 0
    ((llm, _),) = calls
    kv = llm.engine.sequence_runner.kv
    assert (kv.device.type, llm.engine.sequence_runner.model.dtype) == ("cpu", torch.bfloat16)


@pytest.mark.parametrize("option", ["--model", "--hf-model-id"])
def test_model_is_loaded_from_a_directory(run: Run, llm: LLM, tmp_path: Path, option: str) -> None:
    saved = tiny_gpt2()
    saved.tokenizer.save_pretrained(tmp_path)
    saved.model.save_pretrained(tmp_path)
    outcome = run(option, str(tmp_path), "--prompt", "Once", *TWELVE_TOKENS)
    assert (outcome.status, outcome.out) == (0, completion_of(llm, "Once") + "\n")


def test_seed_repeats_a_completion(run: Run) -> None:
    first, repeated, other = (
        run("--prompt", "Once", "--seed", seed, *TWELVE_TOKENS).out for seed in ("1", "1", "2")
    )
    assert first == repeated != other


def test_stop_string_ends_the_completion_before_it(run: Run, llm: LLM) -> None:
    text = completion_of(llm, "Once")
    stop = text[5:7]
    outcome = run("--prompt", "Once", "--stop", stop, *TWELVE_TOKENS)
    assert outcome == Outcome(0, text[: text.index(stop)] + "\n", "")
