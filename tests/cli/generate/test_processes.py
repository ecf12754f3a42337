"""``roseinfer generate`` as a process: pipes, readers that leave, interrupts, start-up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.generate.command_runs import FEW, STARTS, Run, continued
from tests.python_process import ROOT, run_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer import LLM


@pytest.fixture
def command() -> list[str]:
    return [sys.executable, "-m", "roseinfer", "generate", *FEW]


def test_a_pipe_in_and_a_pipe_out(command: list[str], llm: LLM) -> None:
    done = subprocess.run(command, cwd=ROOT, input=b"Once\n", capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, STARTS)
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
    assert (endless.wait(60), endless.stderr.read().decode()) == (141, STARTS)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_a_full_disk_is_said_in_a_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, "--prompt", "Once"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    said = f"{STARTS}roseinfer generate: the texts cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr.decode()) == (2, said)


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
    """An interrupt in torch's C++ would abort the process."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.path.insert(0, {str(tmp_path)!r}); from roseinfer.cli import main; "
        "main(['generate', '--prompt', 'x'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, b"")
    assert done.stderr.decode() == STARTS.splitlines(keepends=True)[0]


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
            heavy = {"torch", "triton", "transformers", "numpy", "tqdm", "huggingface_hub"}
            print(heavy & sys.modules.keys())
    """)
    assert printed.startswith("usage: roseinfer generate")
    assert printed.endswith("\nset()\n")
