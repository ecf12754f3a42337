"""Attention over what is stored, compared with the formula in float64."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities import answers
from pytest_roseinfer.capabilities.cache_data import few_of
from pytest_roseinfer.capabilities.capability import Capability, Inquiry, Ranks, optional
from pytest_roseinfer.capabilities.observation import (
    AFTER_ATTENTION,
    Attended,
    Finding,
    Location,
    Observation,
    find_change,
    invariant,
)
from pytest_roseinfer.capabilities.operation import asked
from pytest_roseinfer.capabilities.payload import VIEWS, lay_out, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from pytest_roseinfer.capabilities.capability import Run
    from pytest_roseinfer.capabilities.observation import Pair
    from pytest_roseinfer.capabilities.payload import Payload
    from pytest_roseinfer.oracle.oracle import Oracle
else:
    from pytest_roseinfer.capabilities import torch


class AttentionMethods:
    """The method that attends."""

    @optional
    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        """Attend with one token of each sequence over all that is stored for it; store nothing.

        The query and the result are ``[len(seqs), q_heads, head_dim]`` in the cache's dtype;
        scores are scaled by ``head_dim ** -0.5``. ``q_heads`` is ``n`` times the cache's heads,
        ``n`` up to 16: query head ``h`` attends to head ``h // n``.
        """


_EVERY = 4
"""Steps between two questions; one always follows the last step of a history."""
_TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
"""Relative to the largest value that a head has stored."""
_MOST_SEQUENCES = 3
_MOST_HEADS = 6
"""KV heads to ask about, over sequences and layers: interpreted, each takes milliseconds, so a
cache with more than these in one layer is not asked at all."""
_MANY_SEQUENCES, _LONG = 9, 512
"""Where so many are live, or one is so long, all are asked about at once: batches and contexts of
this size are what the history is for."""
_QUERY_HEADS = (1, 2, 4, 5, 8, 16)
"""Query heads for each KV head."""


def questions(
    payload: Payload, oracle: Oracle, done: int
) -> Iterator[tuple[Sequence[int], torch.Tensor, str, int]]:
    """Yield sequences, a query for them, its layout, and the layer: every layer unless many.

    The draws depend on what was done alone, so that the same history always asks the same.
    """
    spec = payload.spec
    live = [seq for seq in oracle.sequences if oracle.length(seq) and not oracle.unwritten(seq)]
    if not payload.finite or not live or spec.num_heads > _MOST_HEADS:
        return
    lengths = {seq: oracle.length(seq) for seq in live}
    rng = random.Random(f"{done} {lengths}")
    most = min(len(live), _MOST_SEQUENCES, _MOST_HEADS // spec.num_heads)
    seqs = rng.sample(live, rng.randint(1, most))
    layers = _MOST_HEADS // (len(seqs) * spec.num_heads)
    if len(live) >= _MANY_SEQUENCES or max(lengths.values()) >= _LONG:
        seqs, layers = rng.sample(live, len(live)), spec.num_layers
    groups: Sequence[int] = _QUERY_HEADS
    views: Sequence[str] = VIEWS
    if spec.device != "cpu":
        groups, views = few_of(groups, spec), few_of(views, spec)
    for layer in rng.sample(range(spec.num_layers), min(layers, spec.num_layers)):
        if any(oracle.first_live(seq, layer) == lengths[seq] for seq in seqs):
            continue  # of a window of 1 nothing is left to attend to
        heads = spec.num_heads * rng.choice(groups)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        # No element is above 2 in size, so that scores stay moderate.
        query = torch.rand((len(seqs), heads, spec.head_dim), generator=generator) * 4 - 2
        yield seqs, query.to(spec.device, payload.dtype), rng.choice(views), layer


@invariant(rank=10, needs=("attend",), after=(AFTER_ATTENTION,))
def attention(seen: Observation) -> Finding | None:
    """Attention must be that over all stored tokens, within rounding, and change nothing."""
    for answer in seen.answers:
        if wrong := _wrong_answer(seen, answer):
            return wrong
    if seen.after.books() != seen.before.books():
        return Finding("attend changed the books")
    change = find_change(seen, seen.before.arena, seen.after.arena)
    return Finding("attend changed what is stored", change[0]) if change else None


def _wrong_answer(seen: Observation, asked: Attended) -> Finding | None:
    found, query = asked.found, asked.query
    if isinstance(found, Exception):
        call = f"attend({list(asked.seqs)}, query, {asked.layer})"
        return Finding(f"{call} raised {type(found).__name__}: {found}", cause=found)
    if found.shape != query.shape:
        return Finding(f"attend: expected shape {list(query.shape)}, found {list(found.shape)}")
    if found.device != query.device:
        return Finding(f"attend: expected {query.device}, found {found.device}")
    for row, seq in enumerate(asked.seqs):
        if wrong := _wrong_row(seen, seq, asked.layer, query[row], found[row]):
            return wrong
    return None


def _wrong_row(
    seen: Observation, seq: int, layer: int, query: torch.Tensor, found: torch.Tensor
) -> Finding | None:
    keys, values = _stored(seen, seq, layer, seen.oracle.live(seq, layer))
    expected = attention_by_formula(query, keys, values)
    heads_each = query.shape[0] // seen.spec.num_heads
    largest = values.double().abs().amax((0, 2)).repeat_interleave(heads_each)[:, None]
    tolerance = _tolerance(query.dtype)
    wrong = ~((found.double() - expected).abs() <= tolerance * largest)  # NaN is wrong as well
    if not wrong.any():
        return None
    head, element = wrong.nonzero()[0].tolist()
    return Finding(
        f"attend: sequence {seq}, layer {layer}, query head {head} of KV head "
        f"{head // heads_each}, element {element} ({int(wrong.sum())} of {wrong.numel()} wrong): "
        f"expected {expected[head, element].item():.6g}, "
        f"found {found[head, element].item():.6g}"
        f"{_explained(seen, seq, layer, query, found)}",
        Location(layer, {seq: None}),
    )


def _stored(seen: Observation, seq: int, layer: int, tokens: Sequence[int]) -> Pair:
    """Return what a layer stores of a sequence: as it was written, or, if quantised, as is read."""
    read = seen.before.reads.get(("peek", seq, layer))
    if seen.payload.tolerance and isinstance(read, tuple):
        return read
    return seen.payload.layer(tokens, layer)


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCES.get(name_of(dtype)) or max(2e-6, 2 * torch.finfo(dtype).eps)


def attention_by_formula(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attend with ``[q_heads, head_dim]`` over ``[tokens, heads, head_dim]``, in fp64."""
    heads_each = query.shape[0] // keys.shape[1]
    keys = keys.double().repeat_interleave(heads_each, 1)
    values = values.double().repeat_interleave(heads_each, 1)
    scores = (query.double() * keys).sum(-1) * query.shape[-1] ** -0.5
    return (torch.softmax(scores, 0)[..., None] * values).sum(0)


def _explained(
    seen: Observation, seq: int, layer: int, query: torch.Tensor, found: torch.Tensor
) -> str:
    """Name the usual mistake that would give this result, if there is one."""
    if not found.isfinite().all():
        return ": something was read that is not stored"
    for words, keys, values in _mistakes(seen, seq, layer):
        other = attention_by_formula(query, keys, values)
        near = (found.double() - other).abs() <= _tolerance(query.dtype) * values.abs().max()
        if near.all():
            return f", as it would be {words}"
    return ""


def _mistakes(
    seen: Observation, seq: int, layer: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield keys and values that an attention may take for those of a sequence."""
    oracle = seen.oracle
    tokens = oracle.live(seq, layer)
    keys, values = _stored(seen, seq, layer, tokens)
    if len(tokens) < oracle.length(seq):
        more = oracle.tokens(seq)[-len(tokens) - 1 :]
        yield "with one token from before the window", *seen.payload.layer(more, layer)
    if len(tokens) > 1:
        yield "without the last token", keys[:-1], values[:-1]
        yield "without the first token", keys[1:], values[1:]
    yield "with the KV heads in reverse order", keys.flip(1), values.flip(1)
    for other in (each for each in oracle.sequences if each != seq and oracle.live(each, layer)):
        other_keys, other_values = _stored(seen, other, layer, oracle.live(other, layer))
        yield f"over sequence {other}", other_keys, other_values
        if len(other_keys) == len(tokens):
            yield f"with the keys of sequence {other}", other_keys, values
            yield f"with the values of sequence {other}", keys, other_values
    for other in range(seen.spec.num_layers):
        if other != layer:
            yield f"in layer {other}", *_stored(seen, seq, other, tokens)


def _ask(run: Run) -> list[Attended]:
    """Ask the questions that are due after a step, up to the first that raises an error."""
    answered: list[Attended] = []
    device = run.driven.device
    for seqs, query, layout, layer in questions(run.payload, run.oracle, len(run.done)):
        laid_out = lay_out(query[None], layout)[0]
        device.hand_over(laid_out)
        with device.working():
            found = asked(_attend, run.adapter, list(seqs), laid_out, layer)
        answered.append(Attended(seqs, layer, query, found))
        if isinstance(found, Exception):
            break
    return answered


def _attend(adapter: Any, seqs: list[int], query: torch.Tensor, layer: int) -> torch.Tensor:
    return answers.attention(f"attend({seqs}, query, {layer})", adapter.attend(seqs, query, layer))


def _attend_by_heads(
    ranks: Ranks, seqs: Sequence[int], query: torch.Tensor, layer: int
) -> torch.Tensor:
    heads = ranks.heads(query)
    return torch.cat(ranks.each(lambda at, cache: cache.attend(seqs, *heads[at], layer)), 1)


ATTENTION = Capability(
    methods=AttentionMethods,
    sharded={"attend": _attend_by_heads},
    invariants=(attention,),
    inquiries=(Inquiry(("attend",), _EVERY, _ask, AFTER_ATTENTION),),
)
