"""Does the steps of a history to a cache and its oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.cases.history import (
    AppendMany,
    AppendPadded,
    Copy,
    Fill,
    Fork,
    Free,
    Prefill,
    Reserve,
    SetOptions,
    apply_to_oracle,
    is_write,
    tokens_of,
)
from pytest_roseinfer.cases.layouts import lay_out
from pytest_roseinfer.oracle import padding_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer.cases.history import Operation, Write
    from pytest_roseinfer.running.machine import Machine


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room made for tokens that are not written yet."""

    handle: object
    step: Reserve
    tokens: Sequence[int]
    options: Mapping[str, Any]
    """The switches when it was planned."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step."""

    fits: bool
    """Whether there was room for it; if not, it was refused."""
    options: Mapping[str, Any]
    """The switches it was planned under."""
    written: Write | None = None
    """The write whose tokens are stored by this step: the step itself, or one reserved."""
    tokens: Sequence[int] = ()
    """Those tokens, row by row."""


def do(machine: Machine, step: Operation) -> Outcome:
    """Do a step; fail the machine where the cache refuses what it must accept, or the reverse."""
    if is_write(step):
        return _do_write(machine, step)
    if isinstance(step, Fill):
        return _do_fill(machine)
    fits = apply_to_oracle(machine.oracle, step)
    try:
        _call(machine, step)
    except machine.adapter.full_errors as error:
        if fits:
            machine.fail(f"refused a step that fits: {error}", error)
    except Exception as error:
        machine.fail(f"the step raised {type(error).__name__}: {error}", error)
    else:
        if not fits:
            machine.fail("accepted a step that does not fit")
    return Outcome(fits, machine.options)


def _call(machine: Machine, step: Operation) -> None:
    if isinstance(step, Fork):
        machine.adapter.fork(step.parent, step.child)
    elif isinstance(step, Free):
        machine.adapter.free(step.seq)
    elif isinstance(step, SetOptions):
        machine.adapter.set_options(step.options)
        machine.options = step.options


def _do_write(machine: Machine, step: Write) -> Outcome:
    oracle = machine.oracle
    tokens = tokens_of(oracle, step)
    machine.seen.update(tokens)
    free = oracle.capacity - oracle.pages_used()
    room = f"{oracle.pages_needed(step.rows())} blocks needed, {free} free"
    fits = apply_to_oracle(oracle, step)
    key, value = _inputs(machine, _with_padding(step, tokens), step.layout)
    try:
        _call_write(machine, step, tokens, key, value)
    except machine.adapter.full_errors as error:
        if fits:
            machine.fail(f"refused a write that fits ({room}): {error}", error)
    except Exception as error:
        machine.fail(f"the write raised {type(error).__name__}: {error}", error)
    else:
        if not fits:
            machine.fail(f"accepted a write that does not fit ({room})")
    _spoil(key, value)
    if not fits or isinstance(step, Reserve):
        return Outcome(fits, machine.options)
    return Outcome(fits, machine.options, step, tokens)


def _with_padding(step: Write, tokens: list[int]) -> list[int]:
    if not isinstance(step, AppendPadded):
        return tokens
    coming = iter(tokens)
    return [
        padding_token(row) if seq is None else next(coming) for row, seq in enumerate(step.seqs)
    ]


def _call_write(
    machine: Machine, step: Write, tokens: list[int], key: torch.Tensor, value: torch.Tensor
) -> None:
    adapter = machine.adapter
    if isinstance(step, Prefill):
        adapter.prefill(step.seq, key, value)
    elif isinstance(step, Reserve):
        handle = adapter.reserve(step.seqs, step.counts)
        machine.reserved.append(Reservation(handle, step, tokens, machine.options))
    elif isinstance(step, AppendPadded):
        adapter.append_padded(step.seqs, key, value)
    elif isinstance(step, AppendMany):
        adapter.append_many(step.seqs, step.counts, key, value)
    elif isinstance(step, Copy) and "prefill" in machine.can:
        adapter.prefill(step.child, key, value)
    elif isinstance(step, Copy):
        for at in range(step.count):
            token = slice(at, at + 1)
            adapter.append([step.child], key[:, token], value[:, token])
    else:
        adapter.append(step.seqs, key, value)


def _do_fill(machine: Machine) -> Outcome:
    due = machine.reserved.pop(0)
    key, value = _inputs(machine, due.tokens, due.step.layout)
    try:
        machine.adapter.fill(due.handle, key, value)
    except Exception as error:
        machine.fail(f"fill raised {type(error).__name__}: {error}", error)
    _spoil(key, value)
    return Outcome(True, due.options, due.step, due.tokens)


def _inputs(machine: Machine, tokens: Sequence[int], layout: str) -> list[torch.Tensor]:
    """Keys and values to write."""
    if layout == "wider" and not machine.payload.finite:
        layout = "plain"  # NaN patterns survive no conversion
    layouts = ("fused", "transposed") if layout == "apart" else (layout, layout)
    both = zip(machine.payload.all_layers(tokens), layouts, strict=True)
    return [lay_out(tensor, own) for tensor, own in both]


def _spoil(*inputs: torch.Tensor) -> None:
    """Overwrite what was handed over: a cache that keeps it reads nonsense from here on."""
    for tensor in inputs:
        tensor.fill_(float("nan"))
