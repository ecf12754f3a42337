"""The benchmark of drafts compares the same texts, and counts fewer steps where they repeat."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from roseinfer.bench.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path


def test_both_kinds_of_text_are_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--hf-model-id", "tiny", "--device", "cpu", "--batch", "2", "--max-new-tokens", "120"]
    assert main(["speculation", *words, "--repeat-runs", "2", "--json", str(report)]) == 0
    repeating, other = json.loads(report.read_text())["tables"]["speculation"]
    assert repeating["text"] == "repeats itself"
    assert repeating["same_tokens"] == other["same_tokens"] == 1
    assert repeating["steps"] < 0.67
    assert repeating["accepted"] > 0.5
    assert other["steps"] > 0.9
    assert repeating["min_speedup"] <= repeating["speedup"]
