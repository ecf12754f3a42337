"""Execution of steps and bad calls on the oracle and the cache, with checks of refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.misuse import MisuseState, standard_bad_calls
from pytest_roseinfer.capabilities.observation import Finding, Outcome, Pair, describe_error
from pytest_roseinfer.capabilities.payload import same_bits
from pytest_roseinfer.capabilities.return_values import InvalidReturnValue
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.run.watchdog import StepHung
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import BadCall, CacheSpec
    from pytest_roseinfer.capabilities.capability import Run
    from pytest_roseinfer.capabilities.operation import Operation, Refusal
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Written
    from pytest_roseinfer.oracle.texts import TextSlice


@dataclass(slots=True)
class Execution:
    """One step that is about to be executed."""

    run: Run
    step: Operation
    text_slices: list[TextSlice] = field(init=False)
    refusal: Refusal = field(init=False)
    """Expected refusal if the step does not fit."""
    admitted_part: Operation | None = field(init=False)
    """The step if it fits, else a step of its first rows that fit, or None."""
    written: Written | None = field(init=False)
    """Tokens that it writes if all of it fits; None if it writes none."""
    fits: bool = field(init=False)
    may_fit: bool = field(init=False)
    """True if shared blocks may make room for a step that does not fit the oracle."""
    may_refuse: bool = field(init=False)
    """True if blocks for other use may leave no room for a step that fits the oracle."""

    def __post_init__(self) -> None:
        step, oracle = self.step, self.run.oracle
        self.text_slices = step.text_slices(oracle)
        self.refusal = step.refusal(oracle)
        self.admitted_part, self.written = step.admitted_part(oracle), step.written(oracle)
        self.fits = self.admitted_part is step
        self.may_fit = (
            not self.admitted_part
            and oracle.finds_blocks
            and step.may_find_blocks()
            and not oracle.exceeds_capacity(step.rows())
        )
        self.may_refuse = (
            self.fits
            and not oracle.fits_to_spare(step)
            and (bool(step.rows() or step.new_seqs()) or oracle.takes_blocks(step))
        )

    def do(self) -> Outcome:
        """Execute the step; fail if the cache wrongly refuses or accepts it."""
        run, oracle, admitted = self.run, self.run.oracle, self.admitted_part
        errors: tuple[type[BaseException], ...] = attrgetter(self.refusal.errors)(run.adapter)
        stored, note = None, ""
        if admitted:
            stored = self.written if self.fits else admitted.written(oracle)
            if not self.may_refuse:
                admitted.change(oracle)
        passed = None if self.step.moves_tokens else self.written
        inputs = self._hand_over(passed) if passed else None
        try:
            answer = self._drive()
        except errors as error:
            note = self._refusal_reason(error)
            stored = None if self.may_refuse else stored
        except InvalidReturnValue:
            raise
        except Exception as error:
            self._on_error(error, errors)
        else:
            stored = self._stored_tokens(stored, answer)
        if inputs:
            self._take_back(inputs)
        return Outcome(self.fits, run.cache_under_test.planned_options, stored, note)

    def _drive(self) -> object:
        """Execute the step on the cache; return its answer."""
        run, driven = self.run, self.run.cache_under_test
        driven.planned_options = driven.options
        with driven.device.torch_context():
            for observer in run.observers.values():
                observer.before_call(self.step, self.text_slices)
            driven.text_slices = self.text_slices
            return self.step.drive(driven)

    def _refusal_reason(self, error: BaseException) -> str:
        """Return the reason why the step had to be refused; fail if it fits."""
        run, admitted = self.run, self.admitted_part
        if self.may_refuse:
            self.fits = False
            return f"refused: no room for {run.oracle.describe_spared_blocks()}"
        if self.fits:
            problem = f"refused a {self._name} that fits{self._room}: {describe_error(error)}"
            problem += "".join(each.explain_refusal() for each in run.observers.values())
            run.fail(Finding(problem, cause=error, kind="refused"))
        self.step.refuse(run.oracle, admitted)
        rows = format_count(len(admitted.rows()), "row") if admitted else ""
        after = f" after its first {rows}" if admitted else ""
        return f"refused{after}: {self.refusal.reason}"

    def _on_error(self, error: Exception, errors: tuple[type[BaseException], ...]) -> None:
        expected = f"one of {self.refusal.errors} ({' or '.join(each.__name__ for each in errors)})"
        if self.may_refuse:
            spared = self.run.oracle.describe_spared_blocks()
            hint = f"{self._room}; if it finds no room for {spared}, raise {expected}"
        elif self.fits:
            hint = self._room
        elif self.may_fit:
            hint = f"{self._room}; if it fits only with blocks that are reused, raise {expected}"
        else:
            hint = f"; expected {expected}: {self.refusal.reason}"
        problem = f"the {self._name} raised {describe_error(error)}{hint}"
        kind = f"raised {type(error).__name__}"
        self.run.fail(Finding(problem, cause=error, on_refused_step=not self.fits, kind=kind))

    def _stored_tokens(self, stored: Written | None, answer: object) -> Written | None:
        """Return the tokens stored by a step that the cache accepted; fail if it had no room."""
        step, run = self.step, self.run
        if not self.fits and not self.may_fit:
            problem = f"accepted a {self._name} that {self.refusal.problem}"
            run.fail(Finding(problem, kind="accepted"))
        if not self.fits or self.may_refuse:
            step.change(run.oracle)
            self.fits, stored = True, self.written
        if wrong := step.settle(run.oracle, answer):
            run.fail(Finding(wrong, kind=f"answer to {step.trace_name}"))
        return stored

    @property
    def _name(self) -> str:
        return "write" if self.step.rows() else "step"

    @property
    def _room(self) -> str:
        return self.refusal.room

    def _hand_over(self, written: Written) -> Pair:
        """Make the input tensors of the step for the cache; return a copy of them."""
        run, driven = self.run, self.run.cache_under_test
        writers = (seq for seq, count in written.rows for _ in range(count))
        for seq, token in zip(writers, written.tokens, strict=True):
            run.first_writers.setdefault(token, seq)
        tokens = self.step.inputs(written.tokens)
        driven.key, driven.value = run.payload.inputs(tokens, written.layout)
        inputs = driven.key.clone(), driven.value.clone()
        driven.device.hand_over(driven.key, driven.value)
        return inputs

    def _take_back(self, inputs: Pair) -> None:
        """Check that the input tensors are unchanged; poison them, in case the cache keeps them."""
        driven = self.run.cache_under_test
        if driven.device.idle:
            named = ("keys", driven.key), ("values", driven.value)
            both = zip(named, inputs, strict=True)
            changed = [name for (name, now), was in both if not same_bits(now, was)]
            if changed:
                problem = f"the write changed its input {' and '.join(changed)}"
                self.run.fail(Finding(problem, kind="changed inputs"))
        driven.overwrite_inputs()


# Bad calls after a history


def busy_history(spec: CacheSpec, can: AbstractSet[str]) -> History:
    """Return a history that makes every standard bad call possible.

    It forks, frees and appends in a cache with room, as far as the cache supports this. The newest
    sequence has a partial block of its own.
    """
    steps: list[Operation] = [Append((0, 1)), Fork(0, 2), Free(1), Append((0, 3)), Append((3,))]
    room = replace(spec, num_blocks=max(8, spec.num_blocks), block_size=max(3, spec.block_size))
    return History(room, tuple(step for step in steps if step.needs <= can))


class BadCallRun(Protocol):
    """A machine that has run its history."""

    adapter: KVCacheAdapter
    history: History
    oracle: Oracle
    spec: CacheSpec

    def run_steps(self) -> None: ...
    def make_bad_call(self, bad: BadCall) -> Finding | None: ...


MakeMachine = Callable[["History"], BadCallRun]
"""Function that makes a machine with a new cache for a history."""


def find_bad_call_damage(machine: BadCallRun, anew: MakeMachine) -> list[Finding]:
    """Find the damage of bad calls after this history and, if there is any, after a busy one."""
    if findings := _damage(machine, anew):
        with suppress(Exception):  # other faults of the busy history are not reported here
            busy = anew(busy_history(machine.spec, machine.adapter.abilities))
            busy.run_steps()
            findings += _damage(busy, anew)
    return findings


def _damage(machine: BadCallRun, anew: MakeMachine) -> list[Finding]:
    """Make all bad calls; after one that does damage, go on with a new cache."""
    findings: list[Finding] = []
    history, num_damaged = machine.history, 0
    while True:
        for bad in islice(_bad_calls(machine), num_damaged, None):
            num_damaged += 1
            if finding := machine.make_bad_call(bad):
                findings.append(finding)
                break
        else:
            return findings
        machine = anew(history)
        machine.run_steps()


def describe_other_findings(findings: list[Finding]) -> str:
    """List the findings that differ from the first one; empty without any."""
    others = {each.summary: None for each in findings if each.summary != findings[0].summary}
    return "\n".join(["Bad calls like this one:", *others]) if others else ""


def raised_by(bad: BadCall) -> BaseException | None:
    """Make a bad call; return the error that it raises, or None."""
    try:
        bad.call()
    except StepHung:
        raise
    except BaseException as error:
        if not isinstance(error, (Exception, *bad.errors)):
            raise
        # The frames of a traceback refer to the error: their snapshots would wait for a collection.
        return error.with_traceback(None) if isinstance(error, bad.errors) else error
    return None


def _bad_calls(machine: BadCallRun) -> Iterable[BadCall]:
    adapter = machine.adapter
    standard = standard_bad_calls(MisuseState(adapter, machine.spec, machine.oracle))
    return chain(standard, adapter.bad_calls() if "bad_calls" in adapter.abilities else ())
