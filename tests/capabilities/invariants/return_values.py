"""What invariants about counts, lookups and refusals must pass, and must find."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from pytest_roseinfer import BadCall, Ledger, Oracle, PrefixTraits
from pytest_roseinfer.capabilities.bad_calls import bad_calls
from pytest_roseinfer.capabilities.block_tables import refusals
from pytest_roseinfer.capabilities.cached_blocks import CachedBlocks, CachedBlocksNote
from pytest_roseinfer.capabilities.counting import counts, own_conditions
from pytest_roseinfer.capabilities.observation import Observation, Outcome
from pytest_roseinfer.capabilities.prefixes import lookups
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.oracle.pages import token_of
from tests.capabilities.invariants.observations import (
    CHANGED,
    LATER,
    SPEC,
    WROTE_TWO,
    Right,
    Wrong,
    after,
    attending,
    declaring,
    observed,
)


def refusing(**shown: Any) -> Observation:
    """A step that was refused: the cache is as it was, but for what is ``shown``."""
    seen = observed()
    shown = {"ledgers": seen.before.ledgers, "tables": seen.before.tables, **shown}
    return replace(
        seen,
        outcome=Outcome(fits=False),
        after=replace(seen.before, **shown),
        operation=Append((5,)),
    )


def refusing_in_part() -> Observation:
    """A step that was refused behind its first row, which was stored."""
    seen = observed()
    return replace(seen, operation=Append((0, 5)), outcome=replace(seen.outcome, fits=False))


def counting(**counted: int) -> Observation:
    return after(counts=Counter(counted))


def looking_up(
    found: Any, count: int = 3, *, collided: bool = False, **declared: Any
) -> Observation:
    """Text 0 was looked up, whose first three tokens are in blocks 0 and, in part, 2."""
    said = Oracle(SPEC.block_size, SPEC.num_blocks, branches=((0, 0),))
    held = said.text_tokens(0, 3)
    return replace(
        after(matches={(0, count): found}, collided=frozenset([(0, count)] * collided)),
        oracle=said,
        notes={
            CachedBlocks: CachedBlocksNote({0: {0: held[:2], 1: [token_of(1, 0)], 2: held[2:]}})
        },
        declared=declaring(prefixes=PrefixTraits(shares="equal prefixes", **declared)),
    )


def calling(
    raised: BaseException | None, *errors: type[BaseException], **shown: Any
) -> Observation:
    seen = after(**shown)
    bad = BadCall("a bad call", lambda: None, errors)
    return replace(seen, operation=None, before=observed().after, bad_call=bad, raised=raised)


RIGHT: Right = {
    refusals: [
        observed(),
        refusing(),
        refusing(ledgers=[Ledger({0: 1, 1: 1}, [3, 2], 4)]),
        refusing_in_part(),
    ],
    counts: [
        observed(),
        attending(counts=observed().after.counts + Counter(fast=1)),
        replace(counting(fast=4, fresh=2, full=1), declared=declaring(paths={})),
    ],
    own_conditions: [observed()],
    lookups: [
        looking_up(2),
        looking_up(0, finds="some"),
        looking_up(0, collided=True),
        looking_up(3, granularity="token"),
        looking_up(2, 4, granularity="block", recomputed_tokens=1),
        looking_up(0, 2, recomputed_tokens=1),
    ],
    bad_calls: [calling(KeyError("x"), KeyError), calling(None)],
}
WRONG: Wrong = [
    (
        lookups,
        looking_up(KeyError(3)),
        "match_prefix() of text 0, 3 tokens long, raised KeyError: 3",
    ),
    (lookups, looking_up(4, 4), "found 4, and only 2 of them may be found now"),
    (lookups, looking_up(0), "found 0, though 2 of them are stored"),
    (lookups, looking_up(4, 4, collided=True), "found 4, and only 2 of them may be found now"),
    (
        lookups,
        looking_up(2, 2, recomputed_tokens=1),
        "found 2, and only 0 of them may be found now",
    ),
    (lookups, looking_up(1, finds="some"), "found 1, which are no whole blocks"),
    (
        lookups,
        looking_up(2, granularity="token"),
        "found 2, though 3 of them are stored",
    ),
    (refusals, refusing(tables=observed().after.tables), "found no room changed the books"),
    (
        counts,
        counting(fast=5, fresh=2, full=1, odd=1),
        "'odd' was counted, and is in neither paths nor conditions",
    ),
    (counts, counting(fast=5, fresh=1, full=1), "the count of 'fresh' went down by 1"),
    (counts, counting(fast=4, fresh=2, full=1), "tokens were written and no path was counted"),
    (counts, counting(fast=5, fresh=3), "counted as {'fresh': 1, 'full': 0}; the rows met"),
    (
        counts,
        replace(observed(), outcome=replace(observed().outcome, options={"fast": False})),
        "path 'fast' was counted, which fast=False rules out",
    ),
    (
        counts,
        replace(observed(), outcome=Outcome(True, {}, None)),
        "paths ['fast'] were counted though nothing was written",
    ),
    (
        counts,
        replace(
            observed(),
            outcome=WROTE_TWO,
        ),
        "these rows needed positions [0, 1]",
    ),
    (
        own_conditions,
        counting(fast=5, last_position=1),
        "path_counts() counts 'last_position', which the harness counts itself",
    ),
    (bad_calls, calling(None, KeyError), "a bad call went through; it must raise KeyError"),
    (bad_calls, calling(ValueError("x"), KeyError), "a bad call raised ValueError: x"),
    (bad_calls, calling(None, **CHANGED), "a bad call changed the books"),
    (bad_calls, calling(None, arena=LATER), "changed what is stored in K"),
]
