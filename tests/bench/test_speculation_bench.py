"""The speculation benchmark: equal tokens, and fewer steps on repetitive text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from roseinfer.bench.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_repetitive_and_other_text_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = [
        "--hf-model-id",
        "tiny",
        "--device",
        "cpu",
        "--batch",
        "2",
        "--max-new-tokens",
        "120",
    ]
    assert main(["speculation", *arguments, "--repeat-runs", "2", "--json", str(report)]) == 0
    repeating, other = json.loads(report.read_text())["tables"]["speculation"]
    assert repeating["text"] == "repeats itself"
    assert repeating["same_tokens"] == other["same_tokens"] == 1
    assert repeating["steps"] < 0.67
    assert repeating["accepted"] > 0.5
    assert other["steps"] > 0.9
    assert repeating["min_speedup"] <= repeating["speedup"]
