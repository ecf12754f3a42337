"""Calls that a cache must refuse, or that must leave no trace: histories hold none of them.

An adapter that overrides ``bad_calls`` makes up such calls for the state its cache is in.
Each must raise what it says and leave every bit and every book as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.findings.location import find_change
from pytest_roseinfer.running.snapshot import books_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer.running.machine import Machine


@dataclass(frozen=True, slots=True)
class BadCall:
    """One call, and what must come of it."""

    words: str
    """What is done, as in "free_blocks with a block of another layer"."""
    call: Callable[[], object]
    errors: tuple[type[BaseException], ...] = ()
    """What it must raise. Empty for a call that is fine and undoes itself."""


def check_bad_calls(machine: Machine) -> None:
    """Make every bad call the adapter knows; fail the machine where one goes through."""
    arena = None
    if "arena" in machine.can:
        keys, values = machine.adapter.arena()
        arena = (keys.clone(), values.clone())
    books = books_of(machine)
    for bad in machine.adapter.bad_calls():
        _make(machine, bad)
        if books_of(machine) != books:
            machine.fail(f"{bad.words} changed the books")
    if arena is None:
        return
    for kind, was, now in zip("KV", arena, machine.adapter.arena(), strict=True):
        if place := find_change(machine, kind, was, now):
            what = f"a call that was to be refused changed what is stored in {kind}"
            machine.fail(what, place=place)


def _make(machine: Machine, bad: BadCall) -> None:
    try:
        bad.call()
    except bad.errors:
        return
    except Exception as error:
        machine.fail(f"{bad.words} raised {type(error).__name__}: {error}", error)
    if bad.errors:
        names = " or ".join(kind.__name__ for kind in bad.errors)
        machine.fail(f"{bad.words} went through; it must raise {names}")
