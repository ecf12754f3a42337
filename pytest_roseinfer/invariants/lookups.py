"""A lookup must find what is stored of a text, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.findings.beginnings import same_block_behind_another
from pytest_roseinfer.invariants.invariant import Finding, Observation, invariant
from pytest_roseinfer.oracle.windows import first_live

if TYPE_CHECKING:
    from collections.abc import Sequence


@invariant(rank=3, needs=("matched", "texts", "table", "ledger"))
def lookups(seen: Observation) -> Finding | None:
    for (text, count), found in seen.after.matched.items():
        namespace = seen.oracle.texts.namespace(text) if seen.oracle.texts else 0
        within = f" (namespace {namespace})" if namespace else ""
        asked = f"matched() of text {text}{within}, {count} tokens long,"
        if isinstance(found, Exception):
            return Finding(f"{asked} raised {type(found).__name__}: {found}", cause=found)
        most = _stored(seen, text, count)
        if found > most:
            what = f"{asked} found {found}, and only {most} of them may be found now"
            return Finding(what + _taken_for_it(seen, text, most))
        excused = seen.declared.match_finds == "some" or (text, count) in seen.after.collided
        if found < most and not excused:
            return Finding(f"{asked} found {found}, though {most} of them are stored")
        if seen.declared.match_granularity == "block" and found % seen.spec.block_size:
            return Finding(f"{asked} found {found}, which are no whole blocks")
    return None


def _taken_for_it(seen: Observation, text: int, stored: int) -> str:
    """Say which block says what a text says in the first block that is not stored."""
    size = seen.spec.block_size
    assert seen.oracle.texts
    begin = stored - stored % size
    wanted = seen.oracle.text_tokens(text, begin + size)[begin:]
    every = (
        same_block_behind_another(seen.oracle.texts, wanted, contents, seen.seen)
        for contents in seen.contents.values()
    )
    return next(filter(None, every), "")


def _stored(seen: Observation, text: int, count: int) -> int:
    """Count the first tokens of a text that blocks hold, as many as a lookup may find."""
    size = seen.spec.block_size
    wanted = seen.oracle.text_tokens(text, count - seen.declared.match_leaves)
    blocks = [tuple(wanted[at : at + size]) for at in range(0, len(wanted), size)]
    full = len(wanted) // size
    while full and not all(_holds(seen, layer, blocks[:full]) for layer in seen.contents):
        full -= 1
    stored = full * size
    if seen.declared.match_granularity == "token" and full < len(blocks):
        every = (held for contents in seen.contents.values() for held in contents.values())
        stored += max((_common(blocks[full], held) for held in every), default=0)
    return stored


def _holds(seen: Observation, layer: int, blocks: Sequence[tuple[int, ...]]) -> bool:
    """Return True if a layer has all that is live there once a sequence has these full blocks."""
    size = seen.spec.block_size
    window = seen.spec.windows[layer] if seen.spec.windows else None
    live = blocks[first_live(window, len(blocks) * size) // size :]
    return {tuple(held) for held in seen.contents[layer].values()}.issuperset(live)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the first tokens that two blocks have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
