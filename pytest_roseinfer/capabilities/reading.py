"""Reading back: every sequence, bit for bit, by every route; quantised, nearly so."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_roseinfer.capabilities import answers
from pytest_roseinfer.capabilities.capability import Across, Capability, Look, Run, View, optional
from pytest_roseinfer.capabilities.misuse import NEVER, Call, Situation, misuse
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Location,
    Observation,
    elsewhere,
    invariant,
)
from pytest_roseinfer.capabilities.operation import asked
from pytest_roseinfer.capabilities.payload import all_same_bits, as_bits, same_bits
from pytest_roseinfer.oracle.texts import same_behind_another

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from pytest_roseinfer.capabilities.observation import Pair
    from pytest_roseinfer.capabilities.payload import Payload
    from pytest_roseinfer.oracle.oracle import Oracle
else:
    from pytest_roseinfer.capabilities import torch


class ReadingMethods:
    """The method by which a cache itself reads back."""

    @optional
    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a sequence as the cache itself reads them.

        They are shaped as in ``peek``. In half of the histories it is left out after two steps of
        three, so that a cache which catches up only when it is read is tested as well.
        """


# What a quantised cache may read back for a token: its values, give or take its tolerance.


def beyond(
    payload: Payload, oracle: Oracle, seq: int, layer: int, kind: str, found: torch.Tensor
) -> torch.Tensor:
    """Say for each ``[token, head]`` that is found whether it is further off than it may be."""
    tokens = oracle.tokens(seq)[: len(found)]
    want = _of_kind(payload, tokens, layer, kind).double()
    limits = _limits(payload, oracle, seq, layer, kind)[: len(found)]
    return ~((found.double() - want).abs() <= limits[:, None, None]).all(-1)  # NaN is as well


def _limits(payload: Payload, oracle: Oracle, seq: int, layer: int, kind: str) -> torch.Tensor:
    assert payload.tolerance
    if payload.tolerance.over == "token":
        greatest = _of_kind(payload, oracle.tokens(seq), layer, kind).abs().amax((1, 2)).double()
    else:
        pages = oracle.sequences[seq]
        of_page = [
            _of_kind(payload, [*page.tokens, *page.cut], layer, kind).abs().max().double()
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
    want: torch.Tensor
    got: torch.Tensor


@invariant(rank=12)
def read_back(seen: Observation) -> Finding | None:
    """Each sequence must read back bit for bit; a quantised one, within its tolerance."""
    raised = None
    compared: list[_Compared] = []
    written = cache(partial(_written, seen))
    for (route, seq, layer), found in seen.after.reads.items():
        if isinstance(found, Exception):
            what = f"{route}({seq}, {layer}) raised {type(found).__name__}: {found}"
            raised = Finding(what, Location(layer, {seq: None}), found)
            break
        start, unwritten = seen.oracle.first_live(seq, layer), seen.oracle.unwritten(seq)
        for kind, stored, got in zip("KV", written(seq), found, strict=True):
            want = stored[layer, start:]
            # Room that was reserved holds anything until it is filled.
            own = got[: len(want)] if unwritten else got
            compared.append(_Compared(route, seq, layer, kind, want, own.contiguous()))
    if all_same_bits([(each.want, each.got) for each in compared]):
        return raised
    different = (each for each in compared if not same_bits(each.want, each.got))
    return next(filter(None, (_difference(seen, each) for each in different)), raised)


def _written(seen: Observation, seq: int) -> Pair:
    """Return what a sequence must read back in all layers."""
    tokens = seen.oracle.tokens(seq)
    return seen.payload.all_layers(tokens[: len(tokens) - seen.oracle.unwritten(seq)])


def _difference(seen: Observation, compared: _Compared) -> Finding | None:
    """Say where the two first differ, and what each holds there.

    Those of a quantised cache may differ a little.
    """
    route, seq, layer, kind, want, got = compared
    where = f"{route}: sequence {seq}, layer {layer}, {kind}"
    whole = Location(layer, {seq: None})
    if want.shape != got.shape:
        shapes = f"expected shape {list(want.shape)}, found {list(got.shape)}"
        return Finding(f"{where}: {shapes}", whole)
    for due, found in ((want.dtype, got.dtype), (want.device, got.device)):
        if due != found:
            return Finding(f"{where}: expected {due}, found {found}", whole)
    if seen.payload.tolerance:
        wrong = beyond(seen.payload, seen.oracle, seq, layer, kind, got)
        if not wrong.any():
            return None
    else:
        wrong = (as_bits(want) != as_bits(got)).any(-1)
    row, head = wrong.nonzero()[0].tolist()
    at = row + seen.oracle.first_live(seq, layer)
    tokens = seen.oracle.tokens(seq)
    known = [*tokens, *seen.seen]
    contents = seen.payload.contents(want[row, head], got[row, head], layer, head, kind, known)
    page, slot = divmod(at, seen.spec.block_size)
    same = ""
    if seen.oracle.texts and contents.token is not None:
        same = same_behind_another(seen.oracle.texts, tokens[at], contents.token, seen.seen)
    lies = ""
    if seen.after.arena and not seen.payload.tolerance:  # else it has codes
        lies = elsewhere(seen.after.arena, layer, kind, head, want[row, head])
    return Finding(
        f"{where}: position {at}, head {head} ({int(wrong.sum())} of {wrong.numel()} wrong): "
        f"{contents.words()}{same or lies}",
        Location(layer, {seq: page}, slot=slot, contents=contents),
    )


# What the routes of a cache return, as a copy: the next read may use the same memory.


Reads = dict[tuple[str, int, int], "Pair | Exception"]
"""By route, sequence and layer."""


def read(run: Run, routes: Callable[[int], Iterable[str]], when: str = "") -> Reads:
    """Read every sequence by the routes that are due for it."""
    return {
        (route + when, seq, layer): asked(_copy, run.adapter, route, seq, layer)
        for seq in run.oracle.readable
        for layer in range(run.spec.num_layers)
        for route in routes(seq)
    }


def _copy(adapter: Any, route: str, seq: int, layer: int) -> Pair:
    shown = getattr(adapter, route)(seq, layer)
    like = torch.contiguous_format
    try:
        keys, values = shown
        return keys.clone(memory_format=like), values.clone(memory_format=like)
    except Exception:
        answers.pair(f"{route}({seq}, {layer})", shown)
        raise


def _show_reads(run: Run, look: Look) -> Mapping[str, Any]:
    if not (look.reads and run.driven.device.idle):
        return {}
    every, step, gathers = run.gathers_every, len(run.done), "gather" in run.can

    def routes(seq: int) -> Iterable[str]:
        due = gathers and (run.last or (step + seq) % every == 0)
        return ("peek", "gather") if due else ("peek",)

    return {"reads": read(run, routes)}


# Calls that must be refused.


@misuse("gather")
def gather_unknown(at: Situation) -> Iterator[Call]:
    yield "gather of a sequence that never was", partial(at.adapter.gather, NEVER, at.last)


@misuse("gather", "free")
def gather_freed(at: Situation) -> Iterator[Call]:
    for seq in at.freed()[-1:]:
        yield "gather of a sequence that was freed", partial(at.adapter.gather, seq, at.last)


READING = Capability(
    methods=ReadingMethods,
    misuse=(gather_unknown, gather_freed),
    sharded={"gather": Across.READ},
    views=(View((), _show_reads),),
    invariants=(read_back,),
)
