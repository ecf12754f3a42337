"""The command in this process, and the model it serves."""

from __future__ import annotations

import pytest

from roseinfer import LLM
from roseinfer.cli import main
from tests.cli.generate.command_runs import Outcome, Run, without_progress


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_it(*arguments: str) -> Outcome:
        try:
            status = main(["generate", *arguments])
        except SystemExit as ended:  # argparse
            status = int(ended.code or 0)
        printed = capsys.readouterr()
        return Outcome(status, printed.out, without_progress(printed.err))

    return run_it


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny")
