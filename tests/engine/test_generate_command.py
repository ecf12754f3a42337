"""``roseinfer generate``: what it reads, what it prints and where, and how it ends."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch
import transformers

from roseinfer import LLM, SamplingParams, UnsupportedModel, tiny_gpt2
from roseinfer.cli import main
from roseinfer.config import EngineConfig
from roseinfer.engine import Engine
from tests.engine.families import tiny
from tests.python_process import ROOT, run_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from roseinfer.engine import Update

FEW = ("--max-new-tokens", "12")
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
TOO_LONG = "x" * 1024


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Run(Protocol):
    def __call__(self, *arguments: str) -> Outcome: ...


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_it(*arguments: str) -> Outcome:
        try:
            status = main(["generate", *arguments])
        except SystemExit as ended:  # argparse
            status = int(ended.code or 0)
        printed = capsys.readouterr()
        return Outcome(status, printed.out, printed.err)

    return run_it


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny")


def continued(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> str:
    (output,) = llm.generate(prompt, params)
    assert output.text
    return output.text


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


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


def test_a_dash_is_standard_input_line_by_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, b"first\nsecond\n")
    outcome = run("--prompts-file", "-", "--json", *FEW)
    assert [each["prompt"] for each in outcome.objects] == ["first", "second"]


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_standard_input_is_one_prompt(run: Run, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    give_stdin(monkeypatch, f"two\nlines €\n{end}".encode())
    (only,) = run("--json", *FEW).objects
    assert only["prompt"] == ("two\nlines €\n" if end else "two\nlines €")


# --------------------------------------------------------------------------------- the options

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
    "logprobs": (["--logprobs"], {"logprobs": True}),
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
    "none": ([], {}),
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LLM, SamplingParams]]:
    """What prompts were continued with."""
    found: list[tuple[LLM, SamplingParams]] = []
    generate = LLM.generate

    def spy(self: LLM, prompts: Any, params: SamplingParams) -> Any:
        found.append((self, params))
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", spy)
    return found


@pytest.mark.parametrize(("options", "changed"), SAMPLING.values(), ids=SAMPLING)
def test_sampling_options(
    run: Run,
    used: list[tuple[LLM, SamplingParams]],
    options: list[str],
    changed: dict[str, Any],
) -> None:
    assert run("--json", "--prompt", "x", *options).status == 0
    ((_, params),) = used
    assert params == replace(SamplingParams(temperature=0, max_new_tokens=128), **changed)


@pytest.mark.parametrize(("options", "changed"), ENGINE.values(), ids=ENGINE)
def test_engine_options(
    run: Run,
    used: list[tuple[LLM, SamplingParams]],
    options: list[str],
    changed: dict[str, Any],
) -> None:
    assert run("--json", "--prompt", "x", *FEW, *options).status == 0
    ((llm, _),) = used
    assert llm.config == replace(EngineConfig(), **changed)


def test_every_sampling_parameter_has_an_option() -> None:
    assert SAMPLING.keys() >= {field.name for field in fields(SamplingParams)}


def test_device_and_dtype(run: Run, used: list[tuple[LLM, SamplingParams]]) -> None:
    options = ["--device", "cpu", "--dtype", "bfloat16"]
    assert run("--json", "--prompt", "x", *options, *FEW).status == 0
    ((llm, _),) = used
    kv = llm.engine.sessions.kv
    assert (kv.device.type, llm.engine.sessions.model.dtype) == ("cpu", torch.bfloat16)


@pytest.mark.parametrize("option", ["--model", "--hf-model-id"])
def test_a_model_from_a_directory(run: Run, llm: LLM, tmp_path: Path, option: str) -> None:
    saved = tiny_gpt2()
    saved.tokenizer.save_pretrained(tmp_path)
    saved.model.save_pretrained(tmp_path)
    outcome = run(option, str(tmp_path), "--prompt", "Once", *FEW)
    assert (outcome.status, outcome.out) == (0, continued(llm, "Once") + "\n")


def test_a_seed_repeats_a_text(run: Run) -> None:
    first, again, other = (
        run("--prompt", "Once", "--seed", seed, *FEW).out for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_a_stop_string_ends_the_text_before_it(run: Run, llm: LLM) -> None:
    text = continued(llm, "Once")
    stop = text[5:7]
    outcome = run("--prompt", "Once", "--stop", stop, *FEW)
    assert outcome == Outcome(0, text[: text.index(stop)] + "\n", "")


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
    monkeypatch.setattr(EngineConfig, "lag", lambda *_: 0)
    stdout, seen, step = Shown(), list[str](), Engine.step

    def watched(self: Engine) -> list[Update]:
        seen.append(stdout.shown)
        return step(self)

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["generate", "--prompt", "Once", *FEW]) == 0
    assert seen == ["".join(pieces[:at]) for at in range(len(pieces))]
    assert len({*seen}) > 5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_several_prompts_show_a_bar_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["generate", "--prompt", "a", "--prompt", "b", *FEW]) == 0
    assert "generating: 100%" in stderr.getvalue()
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


# ------------------------------------------------------------------------------------- failures


def test_one_prompt_that_cannot_be_served(run: Run) -> None:
    outcome = run("--prompt", TOO_LONG)
    assert (outcome.status, outcome.out) == (1, "\n")
    (line,) = outcome.err.splitlines()
    assert line.startswith("roseinfer generate: a prompt of 1024 tokens leaves no room")


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_other_prompts_are_served(run: Run, llm: LLM, form: str) -> None:
    outcome = run("--prompt", TOO_LONG, "--prompt", "b", *FEW, *(["--json"] * (form == "json")))
    assert outcome.status == 1
    (line,) = outcome.err.splitlines()
    assert line.startswith("roseinfer generate: prompt 1: a prompt of 1024 tokens leaves no room")
    if form == "json":
        failed, served = outcome.objects
        assert failed["finish_reason"] == "error"
        assert "leaves no room" in failed["error"]
        assert (served["text"], served["error"]) == (continued(llm, "b"), None)
    else:
        assert outcome.out.endswith(f"\n\n==> 2: b <==\n{continued(llm, 'b')}\n")


def test_a_request_that_fails_half_way(run: Run, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = iter([False] * 5 + [True])
    monkeypatch.setattr(EngineConfig, "decodes_in_slots", lambda *_: False)
    monkeypatch.setattr(
        "roseinfer.runner.rows_without_a_distribution",
        lambda logits: torch.tensor([next(rows)], device=logits.device),
    )
    outcome = run("--prompt", "Once", *FEW)
    monkeypatch.undo()
    assert outcome.out == continued(llm, "Once", replace(GREEDY, max_new_tokens=5)) + "\n"
    assert outcome.status == 1
    assert "hold NaN" in outcome.err


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_model_that_is_refused_when_it_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    def refuse(_: Engine) -> None:
        raise UnsupportedModel("it asks its attention\nfor sinks")

    monkeypatch.setattr(Engine, "step", refuse)
    assert run(*["--prompt", "x"] * prompts) == Outcome(
        2, "", "roseinfer generate: it asks its attention for sinks\n"
    )


NOTHING_DONE = {
    "no prompt": ([], "no prompt: give --prompt TEXT, --prompts-file FILE, or a text"),
    "no such file": (["--prompts-file", "nowhere"], "nowhere cannot be read: No such file"),
    "no name": (["--prompts-file", ""], "cannot be read: Is a directory"),
    "a folder": (["--prompts-file", "."], "cannot be read: Is a directory"),
    "an empty file": (["--prompts-file", "empty"], "empty has no prompt: write one a line"),
    "not a text": (["--prompts-file", "bytes"], "--prompts-file bytes is not UTF-8"),
    "words for ids": (["--token-ids", "--prompt", "a 1"], "'a 1' is no list of token ids"),
    "logprobs alone": (["--prompt", "x", "--logprobs"], "--logprobs are printed with --json"),
    "temperature": (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0; it must be"),
    "stop": (["--prompt", "x", "--stop", ""], "stop is ('',); it must be"),
    "engine": (["--prompt", "x", "--block-size", "0"], "block_size must be a whole number"),
    "positions": (["--prompt", "x", "--max-length", "1025"], "the model has 1024 positions"),
    "device": (["--prompt", "x", "--device", "toaster"], "'toaster' is not one that torch knows"),
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
@pytest.mark.parametrize(("options", "message"), NOTHING_DONE.values(), ids=NOTHING_DONE)
def test_what_cannot_be_done_takes_one_line(run: Run, options: list[str], message: str) -> None:
    outcome = run(*options)
    assert (outcome.status, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("roseinfer generate: ")
    assert message in line


@pytest.mark.parametrize("data", [b"", b" \n"])
def test_nothing_on_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    give_stdin(monkeypatch, data)
    outcome = run()
    assert (outcome.status, outcome.out) == (2, "")
    assert "no prompt" in outcome.err


def test_standard_input_that_is_no_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, b"\xff")
    assert run() == Outcome(
        2, "", "roseinfer generate: standard input is not UTF-8: prompts are texts\n"
    )


def test_a_model_the_engine_refuses(run: Run, tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    outcome = run("--model", str(tmp_path), "--prompt", "x")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1].startswith("roseinfer generate: BloomForCausalLM does not")


@pytest.mark.parametrize(
    "options",
    [
        ["--prompt", "x", "--prompts-file", "y"],
        ["--prompt", "x", "--top-k", "many"],
        ["--prompt", "x", "--prefill-admission-policy", "random"],
    ],
    ids=["two sources", "no number", "no policy"],
)
def test_options_that_are_none(run: Run, options: list[str]) -> None:
    outcome = run(*options)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("usage: roseinfer generate")


def test_an_interrupt_ends_it_quietly(run: Run, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = Engine.step, iter(range(3))

    def interrupted(self: Engine) -> list[Update]:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    outcome = run("--prompt", "Once")
    monkeypatch.undo()
    assert (outcome.status, outcome.err) == (130, "")
    assert continued(llm, "Once").startswith(outcome.out)


# ------------------------------------------------------------------------------- real processes


@pytest.fixture
def command() -> list[str]:
    return [sys.executable, "-m", "roseinfer", "generate", *FEW]


def test_a_pipe_in_and_a_pipe_out(command: list[str], llm: LLM) -> None:
    done = subprocess.run(command, cwd=ROOT, input=b"Once\n", capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == continued(llm, "Once") + "\n"


@pytest.fixture
def endless(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    options = ["--prompt", "Once", "--ignore-eos", "--max-new-tokens", "1000"]
    with subprocess.Popen(
        [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def test_a_reader_that_leaves_ends_it_quietly(endless: subprocess.Popen[bytes]) -> None:
    assert endless.stdout is not None
    assert endless.stderr is not None
    assert endless.stdout.read(1)
    endless.stdout.close()
    assert (endless.wait(60), endless.stderr.read()) == (141, b"")


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "no prompt"), (["--prompts-file", "-"], "--prompts-file - has no prompt")],
)
def test_a_closed_standard_input_is_no_prompt(
    command: list[str], options: list[str], message: str
) -> None:
    closed = ["sh", "-c", '"$@" <&-', "sh", *command, *options]
    done = subprocess.run(closed, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"roseinfer generate: {message}")


def test_an_interrupt_amid_imports_ends_it_quietly(tmp_path: Path) -> None:
    """Which in torch's C++ would abort."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.path.insert(0, {str(tmp_path)!r}); from roseinfer.cli import main; "
        "main(['generate', '--prompt', 'x'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_interrupts_are_handled_afterwards_as_before(run: Run, handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert run("--prompt", "x", *FEW).status == 0
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_its_options_load_nothing_heavy() -> None:
    printed = run_python("""
        import sys
        from roseinfer.cli import main

        try:
            main(["generate", "--help"])
        except SystemExit:
            print({"torch", "triton", "transformers", "numpy", "tqdm"} & sys.modules.keys())
    """)
    assert printed.startswith("usage: roseinfer generate")
    assert printed.endswith("\nset()\n")
