"""Every sequence must read back bit for bit, by every route there is; quantised, nearly so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.cases.payload import as_bits, same_bits
from pytest_roseinfer.findings.finding import Location
from pytest_roseinfer.findings.rounded import beyond
from pytest_roseinfer.invariants.invariant import Finding, Observation, invariant

if TYPE_CHECKING:
    import torch

    from pytest_roseinfer.findings.observation import Pair


@invariant(rank=1)
def read_back(seen: Observation) -> Finding | None:
    expected: dict[int, Pair] = {}
    for (route, seq, layer), found in seen.after.reads.items():
        if isinstance(found, Exception):
            what = f"{route}({seq}, {layer}) raised {type(found).__name__}: {found}"
            return Finding(what, Location(layer, {seq: None}), found)
        unwritten = seen.oracle.unwritten(seq)
        if seq not in expected:
            tokens = seen.oracle.tokens(seq)
            expected[seq] = seen.payload.all_layers(tokens[: len(tokens) - unwritten])
        start = seen.oracle.first_live(seq, layer)
        for kind, stored, got in zip("KV", expected[seq], found, strict=True):
            want = stored[layer, start:]
            # Room that was reserved holds anything until it is filled.
            own = got[: len(want)] if unwritten else got
            if same_bits(want, own.contiguous()):
                continue
            if wrong := _difference(seen, route, seq, layer, kind, want, own):
                return wrong
    return None


def _difference(
    seen: Observation,
    route: str,
    seq: int,
    layer: int,
    kind: str,
    want: torch.Tensor,
    got: torch.Tensor,
) -> Finding | None:
    """Say where two ``[tokens, heads, head_dim]`` first differ, and what each holds there.

    Those of a quantised cache may differ a little.
    """
    where = f"{route}: sequence {seq}, layer {layer}, {kind}"
    whole = Location(layer, {seq: None})
    if want.shape != got.shape:
        shapes = f"expected shape {list(want.shape)}, found {list(got.shape)}"
        return Finding(f"{where}: {shapes}", whole)
    if want.dtype != got.dtype:
        return Finding(f"{where}: expected {want.dtype}, found {got.dtype}", whole)
    if seen.payload.tolerance:
        wrong = beyond(seen.payload, seen.oracle, seq, layer, kind, got)
        if not wrong.any():
            return None
    else:
        wrong = (as_bits(want) != as_bits(got.contiguous())).any(-1)
    row, head = wrong.nonzero()[0].tolist()
    at = row + seen.oracle.first_live(seq, layer)
    known = [*seen.oracle.tokens(seq), *seen.seen]
    contents = seen.payload.contents(want[row, head], got[row, head], layer, head, kind, known)
    page, slot = divmod(at, seen.spec.block_size)
    return Finding(
        f"{where}: position {at}, head {head} ({int(wrong.sum())} of {wrong.numel()} wrong): "
        f"{contents.words()}",
        Location(layer, {seq: page}, slot=slot, contents=contents),
    )
