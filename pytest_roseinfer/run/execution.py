"""Does steps and bad calls to the oracle and the cache, which must refuse what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from pytest_roseinfer.capabilities.answers import WrongAnswer
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.misuse import Situation, standard_bad_calls
from pytest_roseinfer.capabilities.observation import Finding, Outcome, Pair, in_words
from pytest_roseinfer.capabilities.payload import same_bits
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.run.watchdog import StepHung

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import BadCall, CacheSpec
    from pytest_roseinfer.capabilities.capability import Run
    from pytest_roseinfer.capabilities.operation import Operation, Refusal
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Written
    from pytest_roseinfer.oracle.texts import Said


@dataclass(slots=True)
class Execution:
    """One step that is about to be done."""

    run: Run
    step: Operation
    said: list[Said] = field(init=False)
    refusal: Refusal = field(init=False)
    """The refusal that is due where the step does not fit."""
    admitted: Operation | None = field(init=False)
    """The part of the step that the oracle has room for: all, its first rows, or nothing."""
    written: Written | None = field(init=False)
    """The tokens that it writes if all of it fits."""
    fits: bool = field(init=False)
    may_fit: bool = field(init=False)
    """True if equal blocks may give the cache room that the oracle does not count."""

    def __post_init__(self) -> None:
        step, oracle = self.step, self.run.oracle
        self.said = step.said(oracle)
        self.refusal = step.refusal(oracle)
        self.admitted, self.written = step.admitted(oracle), step.written(oracle)
        self.fits = self.admitted is step
        self.may_fit = not self.admitted and oracle.finds_blocks and step.may_find_blocks()

    def do(self) -> Outcome:
        """Do the step; fail where the cache refuses it wrongly, or accepts it wrongly."""
        run, oracle, admitted = self.run, self.run.oracle, self.admitted
        errors: tuple[type[BaseException], ...] = attrgetter(self.refusal.errors)(run.adapter)
        stored, note = None, ""
        if admitted:
            stored = self.written if self.fits else admitted.written(oracle)
            admitted.change(oracle)
        handed = self._hand_over(self.written) if self.written else None
        try:
            answer = self._drive()
        except errors as error:
            note = self._refused(error)
        except WrongAnswer:
            raise
        except Exception as error:
            self._raised(error, errors)
        else:
            stored = self._accepted(stored, answer)
        if handed:
            self._take_back(handed)
        return Outcome(self.fits, run.driven.planned_with, stored, note)

    def _drive(self) -> object:
        """Have the cache do the step; return its answer."""
        run, driven = self.run, self.run.driven
        driven.planned_with = driven.options
        with driven.device.working():
            for observer in run.observers.values():
                observer.driving(self.step, self.said)
            driven.said = self.said
            return self.step.drive(driven)

    def _refused(self, error: BaseException) -> str:
        """Return why the step had to be refused."""
        run, admitted = self.run, self.admitted
        if self.fits:
            what = f"refused a {self._name} that fits{self._room}: {in_words(error)}"
            what += "".join(each.about_refusals() for each in run.observers.values())
            run.fail(Finding(what, cause=error))
        self.step.refuse(run.oracle, admitted)
        behind = f" behind its first {len(admitted.rows())} rows" if admitted else ""
        return f"refused{behind}: {self.refusal.reason}"

    def _raised(self, error: Exception, errors: tuple[type[BaseException], ...]) -> None:
        due = f"one of {self.refusal.errors} ({' or '.join(each.__name__ for each in errors)})"
        also = f"{self._room}; if it fits only where blocks are found, raise {due}"
        must = f", where {due} is due: {self.refusal.reason}"
        then = self._room if self.fits else also if self.may_fit else must
        what = f"the {self._name} raised {in_words(error)}{then}"
        self.run.fail(Finding(what, cause=error, without_room=not self.fits))

    def _accepted(self, stored: Written | None, answer: object) -> Written | None:
        """Return what was stored of a step that the cache accepted."""
        step, run = self.step, self.run
        if not self.fits and not self.may_fit:
            run.fail(Finding(f"accepted a {self._name} that {self.refusal.problem}"))
        if not self.fits:
            step.change(run.oracle)
            self.fits, stored = True, self.written
        if wrong := step.settle(run.oracle, answer):
            run.fail(Finding(wrong))
        return stored

    @property
    def _name(self) -> str:
        return "write" if self.step.rows() else "step"

    @property
    def _room(self) -> str:
        return self.refusal.room

    def _hand_over(self, written: Written) -> Pair:
        """Make the tensors that the step is to write; return a copy of them."""
        run, driven = self.run, self.run.driven
        writers = (seq for seq, count in written.rows for _ in range(count))
        for seq, token in zip(writers, written.tokens, strict=True):
            run.seen.setdefault(token, seq)
        tokens = self.step.inputs(written.tokens)
        driven.key, driven.value = run.payload.inputs(tokens, written.layout)
        handed = driven.key.clone(), driven.value.clone()
        driven.device.hand_over(driven.key, driven.value)
        return handed

    def _take_back(self, handed: Pair) -> None:
        """Overwrite the tensors that were handed over: a cache that keeps them reads poison."""
        driven = self.run.driven
        if driven.device.idle:
            given = ("keys", driven.key), ("values", driven.value)
            both = zip(given, handed, strict=True)
            changed = [name for (name, now), was in both if not same_bits(now, was)]
            if changed:
                what = f"the write changed the {' and '.join(changed)} that it was handed"
                self.run.fail(Finding(what))
        driven.device.overwrite(driven.key)
        driven.device.overwrite(driven.value)


# DOC Makes the bad calls that follow a history, and tells of all that leave a trace.


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
