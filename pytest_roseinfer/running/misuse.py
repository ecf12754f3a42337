"""Makes the bad calls that follow a history, and tells of all that leave a trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol

from pytest_roseinfer.adapters.standard_bad_calls import Situation, standard_bad_calls
from pytest_roseinfer.running.busy import busy_history
from pytest_roseinfer.running.watchdog import StepHung

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.adapters.cache import BadCall, CacheSpec, KVCacheAdapter
    from pytest_roseinfer.cases.history import History
    from pytest_roseinfer.findings.finding import Finding
    from pytest_roseinfer.oracle.oracle import Oracle


class Misused(Protocol):
    """A machine that has done its history."""

    adapter: KVCacheAdapter
    history: History
    oracle: Oracle
    spec: CacheSpec

    def run_steps(self) -> None: ...
    def make_bad_call(self, bad: BadCall) -> Finding | None: ...


Anew = Callable[["History"], Misused]
"""Makes a machine with a new cache for a history."""


def left_by_bad_calls(machine: Misused, anew: Anew) -> list[Finding]:
    """Find what bad calls leave, after this history and, if they leave anything, a busy one."""
    if found := _left(machine, anew):
        with suppress(Exception):  # it may have other faults, which are not to be told here
            busy = anew(busy_history(machine.spec, machine.adapter.abilities))
            busy.run_steps()
            found += _left(busy, anew)
    return found


def _left(machine: Misused, anew: Anew) -> list[Finding]:
    """Go on with the next bad call on a new cache, where one left its trace in this one."""
    found: list[Finding] = []
    history, made = machine.history, 0
    while True:
        for bad in islice(_bad_calls(machine), made, None):
            made += 1
            if finding := machine.make_bad_call(bad):
                found.append(finding)
                break
        else:
            return found
        machine = anew(history)
        machine.run_steps()


def words_of_others(found: list[Finding]) -> str:
    """Say what is wrong besides the first finding; nothing if all say the same."""
    others = {each.what: None for each in found if each.what != found[0].what}
    return "\n".join(["Bad calls like this one:", *others]) if others else ""


def raised_by(bad: BadCall) -> BaseException | None:
    try:
        bad.call()
    except StepHung:
        raise
    except BaseException as error:
        if not isinstance(error, (Exception, *bad.errors)):
            raise
        return error
    return None


def _bad_calls(machine: Misused) -> Iterable[BadCall]:
    adapter = machine.adapter
    standard = standard_bad_calls(Situation(adapter, machine.spec, machine.oracle))
    return chain(standard, adapter.bad_calls() if "bad_calls" in adapter.abilities else ())
