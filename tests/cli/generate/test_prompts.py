"""``roseinfer generate``: its prompts, and its output."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM
from roseinfer.cli import main
from roseinfer.config import EngineConfig
from roseinfer.engine.engine import Engine
from tests.cli.generate.command_runs import (
    GREEDY,
    TWELVE_TOKENS,
    Outcome,
    Run,
    Terminal,
    completion_of,
    give_stdin,
)
from tests.models.families import tiny

if TYPE_CHECKING:
    from pathlib import Path

    from roseinfer.engine.engine import Update


# ------------------------------------------------------------------------------------ prompts


def test_single_prompt_prints_only_its_completion(run: Run, llm: LLM) -> None:
    assert run("--prompt", "Once", *TWELVE_TOKENS) == Outcome(
        0, completion_of(llm, "Once") + "\n", ""
    )


def test_several_prompts_have_titles(run: Run, llm: LLM) -> None:
    long = "two\nlines " + "x" * 60
    expected = (
        f"==> 1: Once <==\n{completion_of(llm, 'Once')}\n\n"
        f"==> 2: two lines {'x' * 47}... <==\n{completion_of(llm, long)}\n"
    )
    assert run("--prompt", "Once", "--prompt", long, *TWELVE_TOKENS) == Outcome(0, expected, "")


def test_prompts_file_has_one_prompt_per_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b" first \r\n\n  \nsecond \xe2\x82\xac")
    outcome = run("--prompts-file", str(file), "--json", *TWELVE_TOKENS)
    assert [each["prompt"] for each in outcome.objects] == [" first ", "second €"]


@pytest.mark.parametrize("source", ["a file", "standard input"])
def test_byte_order_mark_is_skipped(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    data = b"\xef\xbb\xbffirst \xef\xbb\xbf"
    (tmp_path / "prompts.txt").write_bytes(data)
    give_stdin(monkeypatch, data)
    options = ["--prompts-file", str(tmp_path / "prompts.txt")] if source == "a file" else []
    (only,) = run(*options, "--json", *TWELVE_TOKENS).objects
    assert only["prompt"] == "first \N{BOM}"


def test_dash_reads_standard_input_by_lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, b"first\nsecond\n")
    outcome = run("--prompts-file", "-", "--json", *TWELVE_TOKENS)
    assert [each["prompt"] for each in outcome.objects] == ["first", "second"]


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_standard_input_is_one_prompt(run: Run, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    give_stdin(monkeypatch, f"two\nlines €\n{end}".encode())
    (only,) = run("--json", *TWELVE_TOKENS).objects
    assert only["prompt"] == ("two\nlines €\n" if end else "two\nlines €")


# ------------------------------------------------------------------------------------- output


class FlushedOutput(io.StringIO):
    """Standard output that exposes only flushed text."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_text_is_flushed_before_the_next_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [update.text for update in llm.stream("Once", GREEDY)]
    monkeypatch.setattr(EngineConfig, "max_steps_in_flight", lambda *_: 0)
    stdout, outputs_before_steps, step = FlushedOutput(), list[str](), Engine.step

    def recorded_step(self: Engine) -> list[Update]:
        outputs_before_steps.append(stdout.flushed)
        return step(self)

    monkeypatch.setattr(Engine, "step", recorded_step)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["generate", "--prompt", "Once", *TWELVE_TOKENS]) == 0
    assert outputs_before_steps == ["".join(pieces[:at]) for at in range(len(pieces))]
    assert len({*outputs_before_steps}) > 5


def test_several_prompts_show_a_progress_bar_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["generate", "--prompt", "a", "--prompt", "b", *TWELVE_TOKENS]) == 0
    assert "generating:   0%" in stderr.getvalue()
    assert "generating" not in capsys.readouterr().out


def test_json_has_one_line_per_prompt(run: Run, llm: LLM) -> None:
    outcome = run("--json", "--prompt", "Once", "--prompt", "€", *TWELVE_TOKENS)
    expected = [
        {
            "prompt": output.prompt,
            "token_ids": output.token_ids,
            "text": output.text,
            "finish_reason": output.finish_reason,
            "error": None,
        }
        for output in llm.generate(["Once", "€"], GREEDY)
    ]
    assert (outcome.status, outcome.objects, outcome.err) == (0, expected, "")


def test_json_of_one_prompt_with_logprobs(run: Run, llm: LLM) -> None:
    (output,) = llm.generate("Once", replace(GREEDY, logprobs=True))
    (record,) = run("--json", "--logprobs", "--prompt", "Once", *TWELVE_TOKENS).objects
    assert record["logprobs"] == pytest.approx(output.logprobs)
    assert not record.keys() & {"top_logprobs", "prompt_logprobs"}


def test_json_has_top_logprobs_and_prompt_logprobs(run: Run, llm: LLM) -> None:
    params = replace(GREEDY, top_logprobs=2, prompt_logprobs=True)
    (output,) = llm.generate("Once", params)
    (record,) = run(
        "--json", "--top-logprobs", "2", "--prompt-logprobs", "--prompt", "Once", *TWELVE_TOKENS
    ).objects
    assert record["logprobs"] == pytest.approx(output.logprobs)
    assert output.prompt_logprobs is not None
    assert output.top_logprobs is not None
    assert record["prompt_logprobs"] == [None, *map(pytest.approx, output.prompt_logprobs[1:])]
    for actual_top, expected_top in zip(record["top_logprobs"], output.top_logprobs, strict=True):
        assert [token for token, _ in actual_top] == [token for token, _ in expected_top]


def test_output_of_libraries_while_loading_goes_to_stderr(
    run: Run, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_init = LLM.__init__

    def printing_init(*args: Any, **options: Any) -> None:
        print("chatter")
        real_init(*args, **options)

    monkeypatch.setattr(LLM, "__init__", printing_init)
    assert run("--prompt", "Once", *TWELVE_TOKENS) == Outcome(
        0, completion_of(llm, "Once") + "\n", "chatter\n"
    )


def test_characters_outside_of_the_encoding_are_replaced(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = completion_of(llm, "Once")
    assert not text.isascii()
    raw_output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw_output, encoding="ascii"))
    assert main(["generate", "--prompt", "Once", *TWELVE_TOKENS]) == 0
    assert raw_output.getvalue() == f"{text}\n".encode("ascii", errors="replace")


# ------------------------------------------------------------------------------------ token ids


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    tiny("llama", "cpu").save_pretrained(folder)
    return str(folder)


def test_text_prompt_without_a_tokenizer_is_reported(run: Run, without_tokenizer: str) -> None:
    outcome = run("--model", without_tokenizer, "--prompt", "Once")
    assert (outcome.status, outcome.out) == (2, "")
    assert "has no tokenizer" in outcome.err.splitlines()[-1]
    assert "--token-ids --prompt '17 42 8'" in outcome.err


def test_token_ids_are_read_and_printed(run: Run, without_tokenizer: str) -> None:
    ids = ["--model", without_tokenizer, "--token-ids", *TWELVE_TOKENS]
    first, second = LLM(without_tokenizer).generate([[17, 42, 8], [5]], GREEDY)
    first_ids, second_ids = (" ".join(map(str, each.token_ids)) for each in (first, second))
    assert run(*ids, "--prompt", " 17 42  8 ").out == f"{first_ids}\n"
    both = run(*ids, "--prompt", "17 42 8", "--prompt", "5")
    assert both.out == f"==> 1: 17 42 8 <==\n{first_ids}\n\n==> 2: 5 <==\n{second_ids}\n"
    (record,) = run(*ids, "--json", "--prompt", "5").objects
    assert (record["prompt"], record["token_ids"], record["text"]) == ([5], second.token_ids, None)
