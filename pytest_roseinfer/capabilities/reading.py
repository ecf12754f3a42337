"""Reading back: every sequence by every route, bit for bit or within the tolerance."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_roseinfer.capabilities import return_values
from pytest_roseinfer.capabilities.capability import (
    Capability,
    RankPolicy,
    Run,
    SnapshotScope,
    View,
    optional,
)
from pytest_roseinfer.capabilities.misuse import UNKNOWN_SEQ, Call, MisuseState, misuse
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Location,
    Observation,
    describe_error,
    find_misplaced,
    invariant,
)
from pytest_roseinfer.capabilities.operation import call_or_error
from pytest_roseinfer.capabilities.payload import all_same_bits, as_bits, same_bits
from pytest_roseinfer.oracle.texts import explain_equal_token
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from pytest_roseinfer.capabilities.observation import Pair
    from pytest_roseinfer.capabilities.payload import Payload
    from pytest_roseinfer.oracle.oracle import Oracle
else:
    from pytest_roseinfer.capabilities import torch


class ReadingMethods:
    """Adapter method that reads with the cache's own code."""

    @optional
    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a sequence, read by the cache's own code.

        Their shapes are as in ``peek``. In half of the histories it is called after one step of
        three, to test caches that do deferred work when they are read.
        """

    @optional
    def gather_first(self, seq: int, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the first ``length`` tokens of a sequence, 1 or more.

        They are read by the cache's own code, after the steps that ``gather`` follows. It is not
        called for a cache whose layers have windows.
        """


# Tolerances


def beyond(
    payload: Payload, oracle: Oracle, seq: int, layer: int, kind: str, actual: torch.Tensor
) -> torch.Tensor:
    """Return a ``[token, head]`` mask of the values outside the tolerance."""
    tokens = oracle.tokens(seq)[: len(actual)]
    expected = _of_kind(payload, tokens, layer, kind).double()
    limits = _limits(payload, oracle, seq, layer, kind)[: len(actual)]
    return ~((actual.double() - expected).abs() <= limits[:, None, None]).all(-1)  # NaN is outside


def _limits(payload: Payload, oracle: Oracle, seq: int, layer: int, kind: str) -> torch.Tensor:
    assert payload.tolerance
    if payload.tolerance.over == "token":
        greatest = _of_kind(payload, oracle.tokens(seq), layer, kind).abs().amax((1, 2)).double()
    else:
        pages = oracle.sequences[seq]
        of_page = [
            _of_kind(payload, [*page.tokens, *page.removed_tokens], layer, kind)
            .abs()
            .max()
            .double()
            for page in pages
        ]
        lengths = [len(oracle.tokens_on(seq, at)) for at in range(len(pages))]
        greatest = torch.stack(of_page).repeat_interleave(torch.tensor(lengths))
    return greatest * payload.tolerance.of_greatest


def _of_kind(payload: Payload, tokens: list[int], layer: int, kind: str) -> torch.Tensor:
    return payload.layer(tokens, layer)["KV".index(kind)]


class _Compared(NamedTuple):
    """Keys or values of one sequence in one layer, ``[tokens, heads, head_dim]``."""

    route: str
    seq: int
    layer: int
    kind: str
    expected: torch.Tensor
    actual: torch.Tensor


@invariant(rank=12)
def read_back(observation: Observation) -> Finding | None:
    """Each sequence must read back bit for bit; a quantised one, within its tolerance."""
    raised = None
    compared: list[_Compared] = []
    written = cache(partial(_written, observation))
    for (route, seq, layer), result in observation.after.reads.items():
        if isinstance(result, Exception):
            problem = f"{route}({seq}, {layer}) raised {describe_error(result)}"
            kind = f"{route} raised {type(result).__name__}"
            raised = Finding(problem, Location(layer, {seq: None}), result, kind=kind)
            break
        start, unwritten = (
            observation.oracle.first_live(seq, layer),
            observation.oracle.unwritten(seq),
        )
        for kind, stored, read_values in zip("KV", written(seq), result, strict=True):
            expected = stored[layer, start:]
            # Reserved room may hold anything until it is filled.
            actual = read_values[: len(expected)] if unwritten else read_values
            compared.append(_Compared(route, seq, layer, kind, expected, actual.contiguous()))
    if all_same_bits([(each.expected, each.actual) for each in compared]):
        return raised
    different = (each for each in compared if not same_bits(each.expected, each.actual))
    return next(filter(None, (_difference(observation, each) for each in different)), raised)


@invariant(rank=13, needs=("gather_first",))
def read_parts(observation: Observation) -> Finding | None:
    """The first tokens of each sequence must read back as its whole does."""
    written = cache(partial(_written, observation))
    for (seq, layer, length), result in observation.after.first_reads.items():
        route = f"gather_first of {format_count(length, 'token')}"
        if isinstance(result, Exception):
            problem = f"{route} of sequence {seq}, layer {layer}, raised {describe_error(result)}"
            kind = f"raised {type(result).__name__}"
            return Finding(problem, Location(layer, {seq: None}), result, kind=kind)
        for kind, stored, actual in zip("KV", written(seq), result, strict=True):
            expected = stored[layer, :length]
            if not same_bits(expected, actual):
                compared = _Compared("gather_first", seq, layer, kind, expected, actual)
                if finding := _difference(observation, compared):
                    words = finding.summary.removeprefix("gather_first")
                    return replace(finding, summary=f"{route}{words}")
    return None


def _written(observation: Observation, seq: int) -> Pair:
    """Return the keys and values that a sequence must read back in all layers."""
    tokens = observation.oracle.tokens(seq)
    return observation.payload.all_layers(tokens[: len(tokens) - observation.oracle.unwritten(seq)])


def _difference(observation: Observation, compared: _Compared) -> Finding | None:
    """Find the first position where two reads differ; within its tolerance, None."""
    route, seq, layer, kind, expected_pair, actual_pair = compared
    location = f"{route}: sequence {seq}, layer {layer}, {kind}"
    whole = Location(layer, {seq: None})
    if expected_pair.shape != actual_pair.shape:
        shapes = f"expected shape {list(expected_pair.shape)}, found {list(actual_pair.shape)}"
        return Finding(f"{location}: {shapes}", whole, kind=f"{route} shape")
    for expected, actual in (
        (expected_pair.dtype, actual_pair.dtype),
        (expected_pair.device, actual_pair.device),
    ):
        if expected != actual:
            problem = f"{location}: expected {expected}, found {actual}"
            return Finding(problem, whole, kind=f"{route} dtype or device")
    if observation.payload.tolerance:
        wrong = beyond(observation.payload, observation.oracle, seq, layer, kind, actual_pair)
        if not wrong.any():
            return None
    else:
        wrong = (as_bits(expected_pair) != as_bits(actual_pair)).any(-1)
    row, head = wrong.nonzero()[0].tolist()
    at = row + observation.oracle.first_live(seq, layer)
    tokens = observation.oracle.tokens(seq)
    known_tokens = [*tokens, *observation.first_writers]
    contents = observation.payload.describe_mismatch(
        expected_pair[row, head], actual_pair[row, head], layer, head, kind, known_tokens
    )
    page, slot = divmod(at, observation.spec.block_size)
    same = ""
    if observation.oracle.texts and contents.token is not None:
        same = explain_equal_token(
            observation.oracle.texts, tokens[at], contents.token, observation.first_writers
        )
    lies = ""
    if (
        observation.after.arena and not observation.payload.tolerance
    ):  # a quantised arena has codes, not values
        lies = find_misplaced(observation.after.arena, layer, kind, head, expected_pair[row, head])
    return Finding(
        f"{location}: position {at}, head {head} ({int(wrong.sum())} of {wrong.numel()} wrong): "
        f"{contents.describe()}{same or lies}",
        Location(layer, {seq: page}, slot=slot, contents=contents),
        kind=f"{route} {contents.finding_kind}",
    )


# Reads


Reads = dict[tuple[str, int, int], "Pair | Exception"]
"""Keys and values, or the error, by route, sequence and layer."""


def read(run: Run, routes: Callable[[int], Iterable[str]], when: str = "") -> Reads:
    """Read every sequence by its routes; copy, since the next read may reuse the memory."""
    return {
        (route + when, seq, layer): call_or_error(_copy, run.adapter, route, seq, layer)
        for seq in run.oracle.readable
        for layer in range(run.spec.num_layers)
        for route in routes(seq)
    }


def _copy(adapter: Any, route: str, seq: int, layer: int, *length: int) -> Pair:
    result = getattr(adapter, route)(seq, layer, *length)
    like = torch.contiguous_format
    try:
        keys, values = result
        return keys.clone(memory_format=like), values.clone(memory_format=like)
    except Exception:
        return_values.pair(f"{route}({', '.join(map(str, (seq, layer, *length)))})", result)
        raise


def _show_reads(run: Run, look: SnapshotScope) -> Mapping[str, Any]:
    if not (look.reads and run.cache_under_test.device.idle):
        return {}
    every, step, gathers = run.gathers_every, len(run.completed_steps), "gather" in run.features

    def routes(seq: int) -> Iterable[str]:
        gather = gathers and (run.last or (step + seq) % every == 0)
        return ("peek", "gather") if gather else ("peek",)

    return {"reads": read(run, routes), "first_reads": _read_parts(run, routes)}


def _read_parts(
    run: Run, routes: Callable[[int], Iterable[str]]
) -> dict[tuple[int, int, int], Pair | Exception]:
    """Read a part of each sequence that is gathered; one step's parts end where another's do not.

    The keys are sequence, layer and number of tokens.
    """
    oracle, size = run.oracle, run.oracle.block_size
    parts: dict[tuple[int, int, int], Pair | Exception] = {}
    if "gather_first" not in run.features or run.spec.windows:
        return parts
    for seq in oracle.readable:
        length = oracle.length(seq)
        ends = (1, size - 1, size, size + 1, length - 1, length)
        lengths = sorted({end for end in ends if 0 < end <= length})
        if not lengths or oracle.unwritten(seq) or "gather" not in routes(seq):
            continue
        part = lengths[len(run.completed_steps) % len(lengths)]
        for layer in range(run.spec.num_layers):
            parts[seq, layer, part] = call_or_error(
                _copy, run.adapter, "gather_first", seq, layer, part
            )
    return parts


# Bad calls


@misuse("gather")
def gather_unknown(at: MisuseState) -> Iterator[Call]:
    yield "gather of a sequence that never was", partial(at.adapter.gather, UNKNOWN_SEQ, at.last)


@misuse("gather", "free")
def gather_freed(at: MisuseState) -> Iterator[Call]:
    for seq in at.freed()[-1:]:
        yield "gather of a sequence that was freed", partial(at.adapter.gather, seq, at.last)


READING = Capability(
    methods=ReadingMethods,
    misuse=(gather_unknown, gather_freed),
    sharded={"gather": RankPolicy.READ, "gather_first": RankPolicy.READ},
    needs={"gather_first": ("gather",)},
    views=(View((), _show_reads),),
    invariants=(read_back, read_parts),
)
