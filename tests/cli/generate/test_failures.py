"""``roseinfer generate``: failures are reported in one line, and other prompts are served."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from roseinfer import LLM, UnsupportedModel
from roseinfer.config import EngineConfig
from roseinfer.engine.engine import Engine
from tests.cli.generate.command_runs import (
    GREEDY,
    TOO_LONG,
    TWELVE_TOKENS,
    Outcome,
    Run,
    Terminal,
    completion_of,
    give_stdin,
)

if TYPE_CHECKING:
    from pathlib import Path

    from roseinfer.engine.engine import Update


def test_rejected_single_prompt_exits_with_1(run: Run) -> None:
    outcome = run("--prompt", TOO_LONG)
    assert (outcome.status, outcome.out) == (1, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("roseinfer generate: a prompt of 1024 tokens leaves no room")


@pytest.mark.parametrize("more", [(), ("--json",), ("--prompt", "b")])
def test_completion_cut_by_the_positions_is_reported(run: Run, more: tuple[str, ...]) -> None:
    """The tiny model has 1024 positions, and one token per character."""
    outcome = run("--prompt", TOO_LONG[:-9], "--max-new-tokens", "12", "--ignore-eos", *more)
    assert outcome.status == 0
    (line,) = outcome.err.splitlines()
    assert line.startswith("roseinfer generate: prompt 1: " if more else "roseinfer generate: ")
    assert "the text was cut after 9 of 12 tokens" in line


def test_completion_of_max_new_tokens_is_not_reported(run: Run) -> None:
    outcome = run("--prompt", TOO_LONG[:-12], "--max-new-tokens", "12", "--ignore-eos")
    assert (outcome.status, outcome.err) == (0, "")


@pytest.mark.parametrize("output_format", ["text", "json"])
def test_other_prompts_are_served(run: Run, llm: LLM, output_format: str) -> None:
    outcome = run(
        "--prompt",
        TOO_LONG,
        "--prompt",
        "b",
        *TWELVE_TOKENS,
        *(["--json"] * (output_format == "json")),
    )
    assert outcome.status == 1
    (line,) = outcome.err.splitlines()
    assert line.startswith("roseinfer generate: prompt 1: a prompt of 1024 tokens leaves no room")
    if output_format == "json":
        failed, served = outcome.objects
        assert failed["finish_reason"] == "error"
        assert "leaves no room" in failed["error"]
        assert (served["text"], served["error"]) == (completion_of(llm, "b"), None)
    else:
        assert outcome.out.endswith(f"\n\n==> 2: b <==\n{completion_of(llm, 'b')}\n")


def test_request_failing_half_way_prints_its_text(
    run: Run, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = iter([False] * 5 + [True])
    monkeypatch.setattr(EngineConfig, "uses_resident_decode", lambda *_: False)
    monkeypatch.setattr(
        "roseinfer.engine.runner.rows_without_a_distribution",
        lambda logits: torch.tensor([next(rows)], device=logits.device),
    )
    outcome = run("--prompt", "Once", *TWELVE_TOKENS)
    monkeypatch.undo()
    assert outcome.out == completion_of(llm, "Once", replace(GREEDY, max_new_tokens=5)) + "\n"
    assert outcome.status == 1
    assert "hold NaN" in outcome.err


@pytest.mark.parametrize("prompts", [1, 2])
def test_model_rejected_in_a_step_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    def raise_unsupported(_: Engine) -> None:
        raise UnsupportedModel("it asks its attention\nfor sinks")

    monkeypatch.setattr(Engine, "step", raise_unsupported)
    assert run(*["--prompt", "x"] * prompts) == Outcome(
        2, "", "roseinfer generate: it asks its attention for sinks\n"
    )


FAILURES = {
    "no prompt": ([], "no prompt: give --prompt TEXT, --prompts-file FILE, or a text"),
    "no such file": (["--prompts-file", "nowhere"], "nowhere cannot be read: No such file"),
    "no name": (["--prompts-file", ""], "cannot be read: Is a directory"),
    "a folder": (["--prompts-file", "."], "cannot be read: Is a directory"),
    "an empty file": (["--prompts-file", "empty"], "empty has no prompt: write one a line"),
    "not a text": (["--prompts-file", "bytes"], "--prompts-file bytes is not UTF-8"),
    "words for ids": (["--token-ids", "--prompt", "a 1"], "'a 1' is not a list of token ids"),
    "logprobs alone": (["--prompt", "x", "--logprobs"], "--logprobs needs --json"),
    "temperature": (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0; it must be"),
    "stop": (["--prompt", "x", "--stop", ""], "stop is ['']; it must be"),
    "engine": (["--prompt", "x", "--block-size", "0"], "block_size must be a whole number"),
    "positions": (["--prompt", "x", "--max-length", "1025"], "has 1024 positions"),
    "device": (
        ["--prompt", "x", "--device", "toaster"],
        "'toaster': the engine runs on cpu, cuda or cuda:1",
    ),
    "dtype": (["--prompt", "x", "--dtype", "int8"], "'int8': it must be one of float32"),
    "no such model": (["--prompt", "x", "--model", "./nowhere"], "'./nowhere' cannot be loaded"),
    "no checkpoint": (["--prompt", "x", "--model", "folder"], "'folder' cannot be loaded"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", Terminal())
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("options", "message"), FAILURES.values(), ids=FAILURES)
def test_failure_is_reported_in_one_line(run: Run, options: list[str], message: str) -> None:
    outcome = run(*options)
    assert (outcome.status, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("roseinfer generate: ")
    assert message in line


@pytest.mark.parametrize("data", [b"", b" \n"])
def test_empty_standard_input_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    give_stdin(monkeypatch, data)
    outcome = run()
    assert (outcome.status, outcome.out) == (2, "")
    assert "no prompt" in outcome.err


def test_standard_input_that_is_not_utf8_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_stdin(monkeypatch, b"\xff")
    assert run() == Outcome(
        2, "", "roseinfer generate: standard input is not UTF-8: prompts are texts\n"
    )


def test_unsupported_model_is_reported(run: Run, tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, state_size=4
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    outcome = run("--model", str(tmp_path), "--prompt", "x")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1].startswith("roseinfer generate: MambaForCausalLM has no")


@pytest.mark.parametrize(
    "options",
    [
        ["--prompt", "x", "--prompts-file", "y"],
        ["--prompt", "x", "--top-k", "many"],
        ["--prompt", "x", "--prefill-admission-policy", "random"],
    ],
    ids=["two sources", "not a number", "unknown policy"],
)
def test_invalid_options_print_the_usage(run: Run, options: list[str]) -> None:
    outcome = run(*options)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("usage: roseinfer generate")


def test_interrupt_exits_with_130_without_a_message(
    run: Run, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Engine.step, iter(range(3))

    def interrupted(self: Engine) -> list[Update]:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    outcome = run("--prompt", "Once")
    monkeypatch.undo()
    assert (outcome.status, outcome.err) == (130, "")
    assert completion_of(llm, "Once").startswith(outcome.out)
