"""Attention over what is stored must equal attention over what the oracle says is stored.

One query token of each of some sequences, in any order and often in groups that share a KV
head. Only finite payloads are asked about: their keys and values are of moderate size (see
``payload``), so that every token weighs something and a wrong one shows.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from pytest_roseinfer.cases.layouts import lay_out
from pytest_roseinfer.findings.location import Place, find_change
from pytest_roseinfer.invariants.counts import check_counts_of_attention
from pytest_roseinfer.running.snapshot import books_of, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.running.machine import Machine
    from pytest_roseinfer.running.snapshot import Snapshot

EVERY = 4
"""Steps between two looks; the last step of a history is always followed by one."""
_TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative to the largest value that a head has stored."""
_MOST_SEQUENCES = 3
_MOST_HEADS = 6
"""KV heads to look at, over sequences and layers: interpreted, each takes milliseconds, so a
cache with more than these in one layer is not asked at all."""
_QUERY_HEADS = (1, 2, 4, 5, 8, 16)
"""Of each KV head."""
_LAYOUTS = ("plain", "fused", "transposed", "strided")


def check_attention(machine: Machine) -> None:
    """Ask for the attention of some sequences, in every layer unless these are many."""
    spec = machine.spec
    live = list(_written(machine))
    if not machine.payload.finite or not live or spec.num_heads > _MOST_HEADS:
        return
    lengths = {seq: machine.oracle.length(seq) for seq in live}
    # Drawn from what was done, so that the same history always asks the same.
    rng = random.Random(f"{len(machine.done)} {lengths}")
    most = min(len(live), _MOST_SEQUENCES, _MOST_HEADS // spec.num_heads)
    seqs = rng.sample(live, rng.randint(1, most))
    layers = _MOST_HEADS // (len(seqs) * spec.num_heads)
    before = take_snapshot(machine)
    for layer in rng.sample(range(spec.num_layers), min(layers, spec.num_layers)):
        _check_layer(machine, seqs, layer, rng)
    _check_nothing_changed(machine, before)
    if "path_counts" in machine.can:
        check_counts_of_attention(machine, before.counts)


def _written(machine: Machine) -> Iterator[int]:
    """Sequences with no tokens that room was made for and that are not there yet."""
    waiting = {seq for due in machine.reserved for seq in due.step.seqs}
    return (seq for seq in machine.oracle.sequences if seq not in waiting)


def _check_layer(machine: Machine, seqs: Sequence[int], layer: int, rng: random.Random) -> None:
    query = _query(machine, len(seqs), rng)
    laid_out = lay_out(query[None], rng.choice(_LAYOUTS))[0]
    try:
        found = machine.adapter.attend(list(seqs), laid_out, layer)
    except Exception as error:
        call = f"attend({list(seqs)}, query, {layer})"
        machine.fail(f"{call} raised {type(error).__name__}: {error}", error)
    if found.shape != query.shape:
        machine.fail(f"attend: expected shape {list(query.shape)}, found {list(found.shape)}")
    for row, seq in enumerate(seqs):
        _compare(machine, seq, layer, query[row], found[row])


def _check_nothing_changed(machine: Machine, before: Snapshot) -> None:
    if books_of(machine) != before.books:
        machine.fail("attend changed the books")
    if before.arena is None:
        return
    for kind, was, now in zip("KV", before.arena, machine.adapter.arena(), strict=True):
        if place := find_change(machine, kind, was, now):
            machine.fail("attend changed what is stored", place=place)


def _query(machine: Machine, rows: int, rng: random.Random) -> torch.Tensor:
    """``[rows, q_heads, head_dim]``, no element above 2 in size: scores stay moderate."""
    spec = machine.spec
    heads = spec.num_heads * rng.choice(_QUERY_HEADS)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    drawn = torch.rand((rows, heads, spec.head_dim), generator=generator) * 4 - 2
    return drawn.to(spec.device, machine.payload.dtype)


def _compare(
    machine: Machine, seq: int, layer: int, query: torch.Tensor, found: torch.Tensor
) -> None:
    keys, values = machine.payload.layer(machine.oracle.tokens(seq), layer)
    expected = attention(query, keys, values)
    heads_each = query.shape[0] // machine.spec.num_heads
    largest = values.double().abs().amax((0, 2)).repeat_interleave(heads_each)[:, None]
    tolerance = _tolerance(query.dtype)
    wrong = ~((found.double() - expected).abs() <= tolerance * largest)  # NaN is wrong as well
    if not wrong.any():
        return
    head, element = wrong.nonzero()[0].tolist()
    machine.fail(
        f"attend: sequence {seq}, layer {layer}, query head {head} of KV head "
        f"{head // heads_each}, element {element} ({int(wrong.sum())} of {wrong.numel()} wrong): "
        f"expected {expected[head, element].item():.6g}, "
        f"found {found[head, element].item():.6g}"
        f"{_explained(machine, seq, layer, query, found)}",
        place=Place(layer, {seq: None}),
    )


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCES.get(dtype) or max(2e-6, 2 * torch.finfo(dtype).eps)


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``[q_heads, head_dim]`` over ``[tokens, heads, head_dim]``, as the formula says it."""
    heads_each = query.shape[0] // keys.shape[1]
    keys = keys.double().repeat_interleave(heads_each, 1)
    values = values.double().repeat_interleave(heads_each, 1)
    scores = (query.double() * keys).sum(-1) * query.shape[-1] ** -0.5
    return (torch.softmax(scores, 0)[..., None] * values).sum(0)


def _explained(
    machine: Machine, seq: int, layer: int, query: torch.Tensor, found: torch.Tensor
) -> str:
    """What the wrong result would be right for, if it is one of the usual mistakes."""
    if not found.isfinite().all():
        return ": something was read that is not stored"
    for words, keys, values in _mistakes(machine, seq, layer):
        other = attention(query, keys, values)
        near = (found.double() - other).abs() <= _tolerance(query.dtype) * values.abs().max()
        if near.all():
            return f", as it would be {words}"
    return ""


def _mistakes(
    machine: Machine, seq: int, layer: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Keys and values that an attention may take for those of a sequence."""
    oracle, payload = machine.oracle, machine.payload
    tokens = oracle.tokens(seq)
    keys, values = payload.layer(tokens, layer)
    if len(tokens) > 1:
        yield "without the last token", keys[:-1], values[:-1]
        yield "without the first token", keys[1:], values[1:]
    yield "with the KV heads in reverse order", keys.flip(1), values.flip(1)
    for other in oracle.sequences:
        stored = payload.layer(oracle.tokens(other), layer)
        if other != seq:
            yield f"over sequence {other}", *stored
        if other != seq and len(stored[0]) == len(tokens):
            yield f"with the keys of sequence {other}", stored[0], values
            yield f"with the values of sequence {other}", keys, stored[1]
    for other in range(machine.spec.num_layers):
        if other != layer:
            yield f"in layer {other}", *payload.layer(tokens, other)
