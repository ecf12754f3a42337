"""Makes the bad calls that follow a history, and tells of all that leave a trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol

from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.misuse import Situation, standard_bad_calls
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.run.watchdog import StepHung

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import BadCall, CacheSpec
    from pytest_roseinfer.capabilities.observation import Finding
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle

# A history after which there is something to misuse in every way that the catalogue knows.


def busy_history(spec: CacheSpec, can: AbstractSet[str]) -> History:
    """Fork, free and append in a cache with room, as far as the cache can.

    The newest sequence has a partial block of its own.
    """
    steps: list[Operation] = [Append((0, 1)), Fork(0, 2), Free(1), Append((0, 3)), Append((3,))]
    room = replace(spec, num_blocks=max(8, spec.num_blocks), block_size=max(3, spec.block_size))
    return History(room, tuple(step for step in steps if step.needs <= can))


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
