"""Words of messages: plurals, and the name that a misspelt one was meant to be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer.settings import PROFILES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.settings import Profile

_REPORT_SUFFIXES = (".json", ".html")


class Mistake(ValueError):
    """An option makes no sense; the message says what would."""


def did_you_mean(said: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a question that names what is spelled most alike, or nothing."""
    from roseinfer import did_you_mean as ask  # not in every pytest run

    return ask(said, known, prefix)


def profile_named(option: str, name: str) -> Profile:
    if name not in PROFILES:
        choices = f"choose one of {', '.join(PROFILES)}"
        raise Mistake(f"{option} {name}: {choices}{did_you_mean(name, PROFILES)}")
    return PROFILES[name]


def require_at_least(option: str, number: float, least: int) -> None:
    if number < least:
        raise Mistake(f"{option} {number:g}: must be at least {least}")


def require_report(option: str, file: str) -> None:
    if Path(file).suffix not in _REPORT_SUFFIXES:
        raise Mistake(f"{option} {file}: the name must end in {' or '.join(_REPORT_SUFFIXES)}")


# How many there are of something, in words.


def some(count: int, what: str) -> str:
    """Return a number and its noun, as in "1 token" and "2 tokens"."""
    return f"{count} {what}{'s' * (count != 1)}"
