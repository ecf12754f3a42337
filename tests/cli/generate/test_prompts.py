"""``roseinfer generate``: the prompts it reads, and what it prints and where."""

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
    FEW,
    GREEDY,
    Outcome,
    Run,
    Terminal,
    continued,
    give_stdin,
)
from tests.models.families import tiny

if TYPE_CHECKING:
    from pathlib import Path

    from roseinfer.engine.engine import Update


# ---------------------------------------------------------------------------------- the prompts


def test_the_text_of_one_prompt_is_all_there_is(run: Run, llm: LLM) -> None:
    assert run("--prompt", "Once", *FEW) == Outcome(0, continued(llm, "Once") + "\n", "")


def test_several_prompts_get_a_title_each(run: Run, llm: LLM) -> None:
    long = "two\nlines " + "x" * 60
    expected = (
        f"==> 1: Once <==\n{continued(llm, 'Once')}\n\n"
        f"==> 2: two lines {'x' * 47}... <==\n{continued(llm, long)}\n"
    )
    assert run("--prompt", "Once", "--prompt", long, *FEW) == Outcome(0, expected, "")


def test_a_file_has_a_prompt_in_each_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b" first \r\n\n  \nsecond \xe2\x82\xac")
    outcome = run("--prompts-file", str(file), "--json", *FEW)
    assert [each["prompt"] for each in outcome.objects] == [" first ", "second €"]


@pytest.mark.parametrize("source", ["a file", "standard input"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    data = b"\xef\xbb\xbffirst \xef\xbb\xbf"
    (tmp_path / "prompts.txt").write_bytes(data)
    give_stdin(monkeypatch, data)
    given = ["--prompts-file", str(tmp_path / "prompts.txt")] if source == "a file" else []
    (only,) = run(*given, "--json", *FEW).objects
    assert only["prompt"] == "first \N{BOM}"


def test_a_dash_is_standard_input_line_by_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, b"first\nsecond\n")
    outcome = run("--prompts-file", "-", "--json", *FEW)
    assert [each["prompt"] for each in outcome.objects] == ["first", "second"]


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_standard_input_is_one_prompt(run: Run, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    give_stdin(monkeypatch, f"two\nlines €\n{end}".encode())
    (only,) = run("--json", *FEW).objects
    assert only["prompt"] == ("two\nlines €\n" if end else "two\nlines €")


# ----------------------------------------------------------------------------------- the output


class Shown(io.StringIO):
    """A standard output of which only what was flushed can be seen."""

    shown = ""

    def flush(self) -> None:
        self.shown = self.getvalue()


def test_text_is_seen_before_the_next_token_is_computed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [update.text for update in llm.stream("Once", GREEDY)]
    monkeypatch.setattr(EngineConfig, "max_steps_in_flight", lambda *_: 0)
    stdout, seen, step = Shown(), list[str](), Engine.step

    def watched(self: Engine) -> list[Update]:
        seen.append(stdout.shown)
        return step(self)

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["generate", "--prompt", "Once", *FEW]) == 0
    assert seen == ["".join(pieces[:at]) for at in range(len(pieces))]
    assert len({*seen}) > 5


def test_several_prompts_show_a_bar_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["generate", "--prompt", "a", "--prompt", "b", *FEW]) == 0
    assert "generating:   0%" in stderr.getvalue()
    assert "generating" not in capsys.readouterr().out


def test_json_has_a_line_for_each_prompt(run: Run, llm: LLM) -> None:
    outcome = run("--json", "--prompt", "Once", "--prompt", "€", *FEW)
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
    (found,) = run("--json", "--logprobs", "--prompt", "Once", *FEW).objects
    assert found["logprobs"] == pytest.approx(output.logprobs)
    assert not found.keys() & {"top_logprobs", "prompt_logprobs"}


def test_json_of_the_likeliest_tokens_and_of_the_prompt(run: Run, llm: LLM) -> None:
    wanted = replace(GREEDY, top_logprobs=2, prompt_logprobs=True)
    (output,) = llm.generate("Once", wanted)
    (found,) = run(
        "--json", "--top-logprobs", "2", "--prompt-logprobs", "--prompt", "Once", *FEW
    ).objects
    assert found["logprobs"] == pytest.approx(output.logprobs)
    assert output.prompt_logprobs is not None
    assert output.top_logprobs is not None
    assert found["prompt_logprobs"] == [None, *map(pytest.approx, output.prompt_logprobs[1:])]
    for mine, theirs in zip(found["top_logprobs"], output.top_logprobs, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs]


def test_what_libraries_print_while_loading_goes_to_stderr(
    run: Run, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = LLM.__init__

    def chatty(*args: Any, **options: Any) -> None:
        print("chatter")
        make(*args, **options)

    monkeypatch.setattr(LLM, "__init__", chatty)
    assert run("--prompt", "Once", *FEW) == Outcome(0, continued(llm, "Once") + "\n", "chatter\n")


def test_characters_the_terminal_does_not_have_are_replaced(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = continued(llm, "Once")
    assert not text.isascii()
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main(["generate", "--prompt", "Once", *FEW]) == 0
    assert printed.getvalue() == f"{text}\n".encode("ascii", errors="replace")


# ------------------------------------------------------------------------------------ token ids


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    tiny("llama", "cpu").save_pretrained(folder)
    return str(folder)


def test_a_text_for_a_model_without_tokenizer(run: Run, without_tokenizer: str) -> None:
    outcome = run("--model", without_tokenizer, "--prompt", "Once")
    assert (outcome.status, outcome.out) == (2, "")
    assert "has no tokenizer" in outcome.err.splitlines()[-1]
    assert "--token-ids --prompt '17 42 8'" in outcome.err


def test_token_ids_in_token_ids_out(run: Run, without_tokenizer: str) -> None:
    ids = ["--model", without_tokenizer, "--token-ids", *FEW]
    first, second = LLM(without_tokenizer).generate([[17, 42, 8], [5]], GREEDY)
    first_ids, second_ids = (" ".join(map(str, each.token_ids)) for each in (first, second))
    assert run(*ids, "--prompt", " 17 42  8 ").out == f"{first_ids}\n"
    both = run(*ids, "--prompt", "17 42 8", "--prompt", "5")
    assert both.out == f"==> 1: 17 42 8 <==\n{first_ids}\n\n==> 2: 5 <==\n{second_ids}\n"
    (found,) = run(*ids, "--json", "--prompt", "5").objects
    assert (found["prompt"], found["token_ids"], found["text"]) == ([5], second.token_ids, None)
