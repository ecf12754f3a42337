"""The measured strength of a search, as runs report it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.report import verdict
from pytest_roseinfer.report.verdict import Strength, describe_strength
from pytest_roseinfer.settings import PROFILES, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "strength.json"
    path.write_text("{}")
    monkeypatch.setattr(verdict, "FILE", path)
    return path


def measure(profile: str = "dev", missed: Mapping[str, int] | None = None) -> None:
    Strength(profile, 40, 10, missed or {}, "1.2", "2026-01-31").write()


def settings_of(profile: str) -> Settings:
    return Settings(profile, PROFILES[profile].examples, PROFILES[profile].steps)


def test_bug_counts_as_found_with_nine_of_ten_seeds() -> None:
    measure(missed={"mostly-found": 9, "luck": 8, "too-rare": 0})
    assert describe_strength(settings_of("dev"), cut_short=False) == (
        "when it was last measured (roseinfer 1.2, 2026-01-31), on roseinfer's own engine and "
        "caches, dev found 38 of 40 planted bugs with at least 90% of 10 seeds; luck with 8 of "
        "them; too-rare with 0 of them"
    )


def test_strength_with_every_bug_found_by_every_seed() -> None:
    measure()
    assert describe_strength(settings_of("dev"), cut_short=False).endswith(
        "dev found 40 of 40 planted bugs with each of 10 seeds"
    )


def test_unmeasured_strength_is_not_reported() -> None:
    measure("ci")
    assert (
        describe_strength(settings_of("nightly"), cut_short=False)
        == "not measured for the profile nightly"
    )
    fewer = Settings("ci", examples=7, steps=PROFILES["ci"].steps)
    assert describe_strength(fewer, cut_short=False) == "not measured: 7 examples in place of 500"
    measure("dev")
    assert describe_strength(settings_of("dev"), cut_short=True).startswith(
        "not measured: some searches ended"
    )


def test_profiles_are_measured_separately(file: Path) -> None:
    measure("ci")
    measure("dev", {"luck": 8})
    measure("ci", {"mostly-found": 9})
    records = json.loads(file.read_text())
    assert {profile: record["missed"] for profile, record in records.items()} == {
        "ci": {"mostly-found": 9},
        "dev": {"luck": 8},
    }
