"""The command run in this process, and the model it serves."""

from __future__ import annotations

import pytest

from roseinfer import LLM
from roseinfer.cli import main
from tests.cli.generate.command_runs import Outcome, Run, without_progress


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*arguments: str) -> Outcome:
        try:
            status = main(["generate", *arguments])
        except SystemExit as exit_error:  # argparse
            status = int(exit_error.code or 0)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, without_progress(captured.err))

    return run_command


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny")
