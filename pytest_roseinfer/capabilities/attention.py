"""Attention over stored tokens, compared with the formula in float64."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities import return_values
from pytest_roseinfer.capabilities.cache_data import few_of
from pytest_roseinfer.capabilities.capability import Capability, Inquiry, Ranks, optional
from pytest_roseinfer.capabilities.observation import (
    AFTER_ATTENTION,
    AttentionOutput,
    Finding,
    Location,
    Observation,
    find_change,
    invariant,
)
from pytest_roseinfer.capabilities.operation import call_or_error
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
    """Adapter method for attention."""

    @optional
    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        """Attend with one query token per sequence over its stored tokens; store nothing.

        The query and the result are ``[len(seqs), q_heads, head_dim]`` in the cache's dtype;
        scores are scaled by ``head_dim ** -0.5``. ``q_heads`` is ``n`` times the cache's heads,
        ``n`` up to 16: query head ``h`` attends to head ``h // n``.
        """


_EVERY = 4
"""Steps between two attention calls; the last step of a history is always followed by one."""
_TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest error by dtype, relative to the largest value that a head has stored."""
_MAX_SEQUENCES = 3
_MAX_HEADS = 6
"""KV heads checked after one step, over sequences and layers: interpreted, each takes milliseconds,
so attention is not checked for a cache with more than these in one layer."""
_MANY_SEQUENCES, _LONG = 9, 512
"""Live sequences, and tokens of one sequence, that are enough for a check of all sequences and
layers: such histories are made for large batches and long contexts."""
_QUERY_HEADS = (1, 2, 4, 5, 8, 16)
"""Query heads per KV head."""


def questions(
    payload: Payload, oracle: Oracle, num_done: int
) -> Iterator[tuple[Sequence[int], torch.Tensor, str, int]]:
    """Yield sequences, a query for them, its layout, and a layer: every layer unless many.

    The draws depend only on the completed steps, so a history always has the same questions.
    """
    spec = payload.spec
    live = [seq for seq in oracle.readable if oracle.length(seq) and not oracle.unwritten(seq)]
    if not payload.finite or not live or spec.num_heads > _MAX_HEADS:
        return
    lengths = {seq: oracle.length(seq) for seq in live}
    rng = random.Random(f"{num_done} {lengths}")
    max_seqs = min(len(live), _MAX_SEQUENCES, _MAX_HEADS // spec.num_heads)
    seqs = rng.sample(live, rng.randint(1, max_seqs))
    layers = _MAX_HEADS // (len(seqs) * spec.num_heads)
    if len(live) >= _MANY_SEQUENCES or max(lengths.values()) >= _LONG:
        seqs, layers = rng.sample(live, len(live)), spec.num_layers
    groups: Sequence[int] = _QUERY_HEADS
    views: Sequence[str] = VIEWS
    if spec.device != "cpu":
        groups, views = few_of(groups, spec), few_of(views, spec)
    for layer in rng.sample(range(spec.num_layers), min(layers, spec.num_layers)):
        if any(oracle.first_live(seq, layer) == lengths[seq] for seq in seqs):
            continue  # a window of 1 leaves nothing to attend to
        heads = spec.num_heads * rng.choice(groups)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        # Elements lie between -2 and 2, so that scores stay moderate.
        query = torch.rand((len(seqs), heads, spec.head_dim), generator=generator) * 4 - 2
        yield seqs, query.to(spec.device, payload.dtype), rng.choice(views), layer


@invariant(rank=10, needs=("attend",), after=(AFTER_ATTENTION,))
def attention(observation: Observation) -> Finding | None:
    """Attention must equal the formula within rounding, and write nothing."""
    for answer in observation.answers:
        if wrong := _wrong_answer(observation, answer):
            return wrong
    if observation.after.tables_and_ledgers() != observation.before.tables_and_ledgers():
        return Finding("attend changed the books", kind="books")
    change = find_change(observation, observation.before.arena, observation.after.arena)
    if change is None:
        return None
    return Finding("attend changed what is stored", change[0], kind="storage")


def _wrong_answer(observation: Observation, answer: AttentionOutput) -> Finding | None:
    output, query = answer.actual, answer.query
    if isinstance(output, Exception):
        call = f"attend({list(answer.seqs)}, query, {answer.layer})"
        name = type(output).__name__
        return Finding(f"{call} raised {name}: {output}", cause=output, kind=f"raised {name}")
    if output.shape != query.shape:
        return Finding(f"attend: expected shape {list(query.shape)}, found {list(output.shape)}")
    if output.device != query.device:
        return Finding(f"attend: expected {query.device}, found {output.device}")
    for row, seq in enumerate(answer.seqs):
        if wrong := _wrong_row(observation, seq, answer.layer, query[row], output[row]):
            return wrong
    return None


def _wrong_row(
    observation: Observation, seq: int, layer: int, query: torch.Tensor, output: torch.Tensor
) -> Finding | None:
    keys, values = _stored(observation, seq, layer, observation.oracle.live(seq, layer))
    expected = attention_by_formula(query, keys, values)
    heads_each = query.shape[0] // observation.spec.num_heads
    largest = values.double().abs().amax((0, 2)).repeat_interleave(heads_each)[:, None]
    tolerance = _tolerance(query.dtype)
    wrong = ~((output.double() - expected).abs() <= tolerance * largest)  # NaN is wrong as well
    if not wrong.any():
        return None
    head, element = wrong.nonzero()[0].tolist()
    return Finding(
        f"attend: sequence {seq}, layer {layer}, query head {head} of KV head "
        f"{head // heads_each}, element {element} ({int(wrong.sum())} of {wrong.numel()} wrong): "
        f"expected {expected[head, element].item():.6g}, "
        f"found {output[head, element].item():.6g}"
        f"{_likely_cause(observation, seq, layer, query, output)}",
        Location(layer, {seq: None}),
    )


def _stored(observation: Observation, seq: int, layer: int, tokens: Sequence[int]) -> Pair:
    """Return keys and values of a sequence in a layer: as written, or as read back if quantised."""
    read = observation.before.reads.get(("peek", seq, layer))
    if observation.payload.tolerance and isinstance(read, tuple):
        return read
    return observation.payload.layer(tokens, layer)


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCES.get(name_of(dtype)) or max(2e-6, 2 * torch.finfo(dtype).eps)


def attention_by_formula(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attend with ``[q_heads, head_dim]`` over ``[tokens, heads, head_dim]``, in float64."""
    heads_each = query.shape[0] // keys.shape[1]
    keys = keys.double().repeat_interleave(heads_each, 1)
    values = values.double().repeat_interleave(heads_each, 1)
    scores = (query.double() * keys).sum(-1) * query.shape[-1] ** -0.5
    return (torch.softmax(scores, 0)[..., None] * values).sum(0)


def _likely_cause(
    observation: Observation, seq: int, layer: int, query: torch.Tensor, output: torch.Tensor
) -> str:
    """Describe a common mistake that would give this output; empty if none matches."""
    if not output.isfinite().all():
        return ": something was read that is not stored"
    for cause, keys, values in _mistakes(observation, seq, layer):
        other = attention_by_formula(query, keys, values)
        near = (output.double() - other).abs() <= _tolerance(query.dtype) * values.abs().max()
        if near.all():
            return f", as it would be {cause}"
    return ""


def _mistakes(
    observation: Observation, seq: int, layer: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield keys and values that a wrong kernel may read instead of a sequence's, with words."""
    oracle = observation.oracle
    tokens = oracle.live(seq, layer)
    keys, values = _stored(observation, seq, layer, tokens)
    if len(tokens) < oracle.length(seq):
        more = oracle.tokens(seq)[-len(tokens) - 1 :]
        yield "with one token from before the window", *observation.payload.layer(more, layer)
    if len(tokens) > 1:
        yield "without the last token", keys[:-1], values[:-1]
        yield "without the first token", keys[1:], values[1:]
    yield "with the KV heads in reverse order", keys.flip(1), values.flip(1)
    for other in (each for each in oracle.sequences if each != seq and oracle.live(each, layer)):
        other_keys, other_values = _stored(observation, other, layer, oracle.live(other, layer))
        yield f"over sequence {other}", other_keys, other_values
        if len(other_keys) == len(tokens):
            yield f"with the keys of sequence {other}", other_keys, values
            yield f"with the values of sequence {other}", keys, other_values
    for other in range(observation.spec.num_layers):
        if other != layer:
            yield f"in layer {other}", *_stored(observation, seq, other, tokens)


def _call_attend(run: Run) -> list[AttentionOutput]:
    """Call ``attend`` for the questions after a step, up to the first that raises an error."""
    answers: list[AttentionOutput] = []
    device = run.cache_under_test.device
    for seqs, query, layout, layer in questions(run.payload, run.oracle, len(run.completed_steps)):
        laid_out = lay_out(query[None], layout)[0]
        device.hand_over(laid_out)
        with device.torch_context():
            output = call_or_error(_attend, run.adapter, list(seqs), laid_out, layer)
        answers.append(AttentionOutput(seqs, layer, query, output))
        if isinstance(output, Exception):
            break
    return answers


def _attend(adapter: Any, seqs: list[int], query: torch.Tensor, layer: int) -> torch.Tensor:
    return return_values.attention(
        f"attend({seqs}, query, {layer})", adapter.attend(seqs, query, layer)
    )


def _attend_by_heads(
    ranks: Ranks, seqs: Sequence[int], query: torch.Tensor, layer: int
) -> torch.Tensor:
    heads = ranks.heads(query)
    return torch.cat(ranks.each(lambda at, cache: cache.attend(seqs, *heads[at], layer)), 1)


ATTENTION = Capability(
    methods=AttentionMethods,
    sharded={"attend": _attend_by_heads},
    invariants=(attention,),
    inquiries=(Inquiry(("attend",), _EVERY, _call_attend, AFTER_ATTENTION),),
)
