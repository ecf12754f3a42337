"""A block is given back when it left the window of its group, no sooner and no later."""

from __future__ import annotations

from pytest_roseinfer.findings.finding import Location, location_of_block
from pytest_roseinfer.invariants.books.ownership import wrong_length
from pytest_roseinfer.invariants.invariant import Finding, Observation, invariant
from pytest_roseinfer.oracle.windowed import WindowedOracle
from pytest_roseinfer.oracle.windows import AT_ONCE, first_live


@invariant(rank=0, needs=("table", "windows"))
def windows(seen: Observation) -> Finding | None:
    for seq in _begun(seen):
        if found := _wrong_beginning(seen, seq):
            return found
    for layer, window in enumerate(seen.spec.windows):
        if found := _in_two_groups(seen, layer):
            return found
        for seq in seen.oracle.sequences:
            if found := wrong_length(seen, seq, layer) or _wrong_end(seen, seq, layer, window):
                return found
    return None


def _wrong_end(seen: Observation, seq: int, layer: int, window: int | None) -> Finding | None:
    """Say where a table has None for a block that is needed, or a block that is not."""
    gone, live = seen.oracle.given_back(seq, layer), seen.oracle.first_live(seq, layer)
    if seq in _begun(seen):
        gone = _held_from(seen, seq, layer)
    for at, block in enumerate(seen.after.tables_of(layer)[seq]):
        if (block is None) == (at < gone):
            continue
        where = f"layer {layer} of window {window}, sequence {seq}: block {at} of its table"
        what = f"{where} is {block}, and must be None: its tokens have all left the window"
        if block is None:
            what = f"{where} is None, though it is to be held: tokens from {live} on are live"
        return Finding(what, Location(layer, {seq: at}, block))
    return None


def _begun(seen: Observation) -> set[int]:
    """Return the sequences that began in this step with what may have been found of a text.

    What its window left out of that, such a sequence has never held.
    """
    oracle, written = seen.oracle, seen.outcome.written
    assert isinstance(oracle, WindowedOracle)
    if (
        oracle.windows.gives_back == AT_ONCE
        or seen.declared.sharing != "equal prefixes"
        or not written
    ):
        return set()
    return {seq for seq, count in written.rows if count == oracle.length(seq)}


def _held_from(seen: Observation, seq: int, layer: int) -> int:
    """Return where in its table a sequence has its first block."""
    table = seen.after.tables_of(layer)[seq]
    return next((at for at, block in enumerate(table) if block is not None), len(table))


def _wrong_beginning(seen: Observation, seq: int) -> Finding | None:
    """Say where no beginning of a text explains what a sequence left out that found it."""
    size, most = seen.spec.block_size, seen.oracle.length(seq) - seen.declared.match_leaves
    left_out = {layer: _held_from(seen, seq, layer) for layer in seen.oracle.groups}

    def explains(found: int) -> bool:
        windows = {layer: seen.spec.windows[layer] for layer in left_out}
        return left_out == {at: first_live(each, found) // size for at, each in windows.items()}

    if any(explains(found) for found in range(0, most + 1, size)):
        return None
    each = ", ".join(f"{blocks} in layer {layer}" for layer, blocks in left_out.items())
    return Finding(
        f"sequence {seq} has {seen.oracle.length(seq)} tokens, and the first blocks of its tables "
        f"are None, {each}: no number of tokens that it can have found explains that",
        Location(0, {seq: None}),
    )


def _in_two_groups(seen: Observation, layer: int) -> Finding | None:
    """Say where layers that share a pool disagree about whose a block is."""
    (_, *others), shown = seen.oracle.pool_of(layer), seen.after
    if both := shown.owners(layer).keys() & shown.owners(*others).keys():
        what = f"blocks {sorted(both)} of layer {layer} are held in another group of layers too"
        return Finding(what, location_of_block(seen, layer, min(both)))
    if isinstance(seen.oracle, WindowedOracle) and seen.oracle.windows.shared_pool:
        first = seen.spec.windows.index(seen.spec.windows[layer])
        if shown.tables_of(layer) != shown.tables_of(first):
            return Finding(f"layers {first} and {layer} have one window and different tables")
    return None
