"""``roseinfer generate`` as a process: pipes, closed outputs, interrupts, start-up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.generate.command_runs import STARTUP, TWELVE_TOKENS, Run, completion_of
from tests.python_process import ROOT, run_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer import LLM


@pytest.fixture
def command() -> list[str]:
    """Return a command without the warning that float32 is not batch invariant on a GPU."""
    return [sys.executable, "-m", "roseinfer", "generate", "--no-batch-invariant", *TWELVE_TOKENS]


def test_command_works_with_pipes(command: list[str], llm: LLM) -> None:
    process = subprocess.run(command, cwd=ROOT, input=b"Once\n", capture_output=True, check=False)
    assert (process.returncode, process.stderr.decode()) == (0, STARTUP)
    assert process.stdout.decode() == completion_of(llm, "Once") + "\n"


@pytest.fixture
def long_run(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    options = ["--prompt", "Once", "--ignore-eos", "--max-new-tokens", "1000"]
    with subprocess.Popen(
        [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


@pytest.mark.slow
def test_closed_stdout_ends_the_command_without_a_message(
    long_run: subprocess.Popen[bytes],
) -> None:
    assert long_run.stdout is not None
    assert long_run.stderr is not None
    assert long_run.stdout.read(1)
    long_run.stdout.close()
    assert (long_run.wait(60), long_run.stderr.read().decode()) == (141, STARTUP)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_reported_in_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [*command, "--prompt", "Once"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    stderr = f"{STARTUP}roseinfer generate: the texts cannot be written: No space left on device\n"
    assert (process.returncode, process.stderr.decode()) == (2, stderr)


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "no prompt"), (["--prompts-file", "-"], "--prompts-file - has no prompt")],
)
def test_closed_standard_input_is_reported(
    command: list[str], options: list[str], message: str
) -> None:
    closed_stdin = ["sh", "-c", '"$@" <&-', "sh", *command, *options]
    process = subprocess.run(closed_stdin, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(f"roseinfer generate: {message}")


def test_interrupt_during_imports_ends_the_command(tmp_path: Path) -> None:
    """An interrupt in torch's C++ would abort the process."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.path.insert(0, {str(tmp_path)!r}); from roseinfer.cli import main; "
        "main(['generate', '--prompt', 'x'])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False
    )
    assert (process.returncode, process.stdout) == (-signal.SIGINT, b"")
    assert process.stderr.decode() == STARTUP.splitlines(keepends=True)[0]


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_interrupt_handler_is_restored(run: Run, handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert run("--prompt", "x", *TWELVE_TOKENS).status == 0
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_help_imports_no_heavy_module() -> None:
    output = run_python("""
        import sys
        from roseinfer.cli import main

        try:
            main(["generate", "--help"])
        except SystemExit:
            heavy = {"torch", "triton", "transformers", "numpy", "tqdm", "huggingface_hub"}
            print(heavy & sys.modules.keys())
    """)
    assert output.startswith("usage: roseinfer generate")
    assert output.endswith("\nset()\n")
