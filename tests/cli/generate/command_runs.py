"""Runs of ``roseinfer generate``, and their expected output."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from roseinfer import LLM, SamplingParams

if TYPE_CHECKING:
    import pytest

TWELVE_TOKENS = ("--max-new-tokens", "12")
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
TOO_LONG = "x" * 1024
STARTUP = "roseinfer generate: importing torch and transformers\nroseinfer generate: loading tiny\n"
"""Lines that every run prints before its first prompt."""
_PROGRESS = ("roseinfer generate: importing ", "roseinfer generate: loading ", "generating: ")


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str
    """Standard error without lines of progress."""

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def without_progress(stderr: str) -> str:
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_PROGRESS))


class Run(Protocol):
    def __call__(self, *arguments: str) -> Outcome: ...


def completion_of(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> str:
    (output,) = llm.generate(prompt, params)
    assert output.text
    return output.text


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
