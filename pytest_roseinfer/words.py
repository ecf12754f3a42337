"""Wording of messages: plurals, and suggestions for misspelt names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer.settings import PROFILES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.settings import Profile

_REPORT_SUFFIXES = (".json", ".html")


class OptionError(ValueError):
    """Invalid value of an option; the message names valid ones."""


def did_you_mean(name: str, known_names: Iterable[str], prefix: str = "") -> str:
    """Return a question with the known name closest to a misspelt one, or ""."""
    from roseinfer._plugin import did_you_mean as suggest  # late: most runs do not need it

    return suggest(name, known_names, prefix)


def profile_named(option: str, name: str) -> Profile:
    if name not in PROFILES:
        choices = f"choose one of {', '.join(PROFILES)}"
        raise OptionError(f"{option} {name}: {choices}{did_you_mean(name, PROFILES)}")
    return PROFILES[name]


def require_at_least(option: str, number: float, minimum: int) -> None:
    if number < minimum:
        raise OptionError(f"{option} {number:g}: must be at least {minimum}")


def require_report(option: str, file: str) -> None:
    if Path(file).suffix not in _REPORT_SUFFIXES:
        raise OptionError(f"{option} {file}: the name must end in {' or '.join(_REPORT_SUFFIXES)}")


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, as in "1 token" and "2 tokens"."""
    return f"{count} {noun}{'s' * (count != 1)}"
