"""Lists what is simpler than one step of a history: fewer rows, smaller numbers, usual switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.cases.operations.operation import NAMING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_roseinfer.cases.operations.operation import Operation


def simpler_steps(step: Operation, usual: Mapping[str, Any]) -> Iterator[Operation]:
    """List steps of the same kind; ``usual`` are the switches of a cache that nobody changed."""
    yield from _with_fewer_rows(step)
    for each in fields(step):  # type: ignore[arg-type]
        value = getattr(step, each.name)
        if isinstance(value, Mapping):
            yield from (replace_field(step, each.name, new) for new in more_usual(value, usual))
        elif each.default is not MISSING and value != each.default:
            yield replace_field(step, each.name, each.default)
    yield from _with_smaller_numbers(step)


def more_usual(options: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """List switches that differ from the usual ones in nothing, then in one less."""
    unusual = [name for name in usual if options.get(name) != usual[name]]
    if unusual:
        yield {**options, **usual}
    yield from ({**options, name: usual[name]} for name in unusual)


def with_numbers(step: Operation, change: Callable[[int], int]) -> Operation:
    """Return a step with each number changed that is no name, none below the least."""
    for name, numbers in _numbers(step).items():
        changed = tuple(max(step.least, change(number)) for number in numbers)
        single = isinstance(getattr(step, name), int)
        step = replace_field(step, name, changed[0] if single else changed)
    return step


def smaller_numbers(number: int, least: int) -> list[int]:
    """List some numbers below this one, the smallest first."""
    few = {least, least + 1, number // 2, number - 2, number - 1}
    return sorted(each for each in few if least <= each < number)


def replace_field(step: Operation, name: str, value: object) -> Operation:
    return replace(step, **{name: value})  # type: ignore[type-var]


def _with_fewer_rows(step: Operation) -> Iterator[Operation]:
    rows = {name: value for name, value in _values(step).items() if isinstance(value, tuple)}
    count = len(next(iter(rows.values()), ()))
    for at in reversed(range(count if count > 1 else 0)):
        left = {name: value[:at] + value[at + 1 :] for name, value in rows.items()}
        yield replace(step, **left)  # type: ignore[type-var]


def _with_smaller_numbers(step: Operation) -> Iterator[Operation]:
    for name, numbers in _numbers(step).items():
        for at, number in enumerate(numbers):
            for smaller in smaller_numbers(number, step.least):
                changed = (*numbers[:at], smaller, *numbers[at + 1 :])
                single = isinstance(getattr(step, name), int)
                yield replace_field(step, name, smaller if single else changed)


def _numbers(step: Operation) -> dict[str, tuple[int, ...]]:
    """Return the numbers of each field that holds any, names no sequence and has no default."""
    open_ = {each.name for each in fields(step) if each.default is MISSING}  # type: ignore[arg-type]
    values = {name: value for name, value in _values(step).items() if name in open_ - {*NAMING}}
    return {
        name: value if isinstance(value, tuple) else (value,)
        for name, value in values.items()
        if isinstance(value, int | tuple)
    }


def _values(step: Operation) -> dict[str, Any]:
    return {each.name: getattr(step, each.name) for each in fields(step)}  # type: ignore[arg-type]
