"""Right and wrong observations for the invariants of counts, lookups and refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import (
    BadCall,
    BlockRemoved,
    BlockStored,
    Ledger,
    Oracle,
    PrefixTraits,
    TierTraits,
    Transfer,
)
from pytest_roseinfer.capabilities.bad_calls import bad_calls
from pytest_roseinfer.capabilities.block_tables import refusals
from pytest_roseinfer.capabilities.cached_blocks import CachedBlocks, CachedBlocksNote
from pytest_roseinfer.capabilities.counting import counts, own_conditions
from pytest_roseinfer.capabilities.events import EventReplay, Events, events
from pytest_roseinfer.capabilities.observation import Observation, Outcome
from pytest_roseinfer.capabilities.prefixes import lookups
from pytest_roseinfer.capabilities.tiers import (
    TierBooks,
    TierContents,
    TierNote,
    blocks_in_flight,
    tier_lookups,
)
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

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.cache_data import Event


def refusing(**shown: Any) -> Observation:
    """Return an observation of a refused step, with changes to the snapshot after it."""
    observation = observed()
    shown = {"ledgers": observation.before.ledgers, "tables": observation.before.tables, **shown}
    return replace(
        observation,
        outcome=Outcome(fits=False),
        after=replace(observation.before, **shown),
        operation=Append((5,)),
    )


def refusing_in_part() -> Observation:
    """Return an observation of a step that was refused after its first row was stored."""
    observation = observed()
    return replace(
        observation, operation=Append((0, 5)), outcome=replace(observation.outcome, fits=False)
    )


def counting(**counts_shown: int) -> Observation:
    return after(counts=Counter(counts_shown))


def looking_up(
    found: Any, count: int = 3, *, collided: bool = False, **declared: Any
) -> Observation:
    """Return an observation of a lookup of text 0, with three tokens in blocks 0 and 2."""
    oracle = Oracle(SPEC.block_size, SPEC.num_blocks, branches=((0, 0),))
    tokens = oracle.text_tokens(0, 3)
    return replace(
        after(matches={(0, count): found}, collided=frozenset([(0, count)] * collided)),
        oracle=oracle,
        notes={
            CachedBlocks: CachedBlocksNote({0: {0: tokens[:2], 1: [token_of(1, 0)], 2: tokens[2:]}})
        },
        declared=declaring(prefixes=PrefixTraits(shares="equal prefixes", **declared)),
    )


def reading(observation: Observation, *sent: Event) -> Observation:
    """Return an observation of a lookup after these events."""
    return replace(
        observation,
        after=replace(observation.after, events=sent),
        notes={Events: EventReplay(SPEC.block_size).after(sent)},
    )


FIRST = BlockStored(["a"], None, [1, 1])


def looking_up_tiers(found: Any, *, stored: bool = False, collided: bool = False) -> Observation:
    """Return an observation of a lookup in all tiers, of four tokens of text 0.

    The first two are in block 0, the others may be in a lower tier, or must be if ``stored``.
    """
    observation = looking_up(2, 4, collided=collided)
    tokens = observation.oracle.text_tokens(0, 4)
    block = frozenset({tuple(tokens[2:])})
    note = TierNote(TierBooks(block, block if stored else frozenset()), {}, {})
    return replace(
        observation,
        after=replace(observation.after, tier_matches={(0, 4): found}),
        notes={**observation.notes, TierContents: note},
    )


def moving(
    *transfers: Transfer,
    before: tuple[int, ...] | None = None,
    awaiting: int | None = None,
    error: Exception | None = None,
    **traits: bool,
) -> Observation:
    """Return an observation with transfers in flight, which began with ``before`` in block 0."""
    tokens = tuple(observed().oracle.tokens(0))
    contents = frozenset({before or tokens[:2]})
    in_flight = {each.id: [contents] * len(each.blocks) for each in transfers}
    awaited = {} if awaiting is None else {each.id: awaiting for each in transfers}
    note = TierNote(TierBooks(in_flight=in_flight), {0: tokens[:2], 2: tokens[2:]}, awaited)
    return replace(
        after(transfers=error or transfers),
        notes={TierContents: note},
        declared=declaring(tiers=TierTraits(**traits)),
    )


OTHER = (token_of(3, 0), token_of(3, 1))


def calling(
    raised: BaseException | None, *errors: type[BaseException], **shown: Any
) -> Observation:
    observation = after(**shown)
    bad = BadCall("a bad call", lambda: None, errors)
    return replace(
        observation, operation=None, before=observed().after, bad_call=bad, raised=raised
    )


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
    tier_lookups: [
        looking_up_tiers(2),
        looking_up_tiers(4),
        looking_up_tiers(4, stored=True),
        looking_up_tiers(0, stored=True, collided=True),
    ],
    blocks_in_flight: [
        moving(),
        moving(Transfer(0, "store", (0,))),
        moving(Transfer(0, "store", (0,)), before=OTHER, holds_blocks=False),
        moving(Transfer(0, "load", (2,), 0), awaiting=0),
        moving(Transfer(0, "load", (3,), 5)),
        moving(Transfer(0, "move", moved=1)),
    ],
    lookups: [
        looking_up(2),
        looking_up(0, finds="some"),
        looking_up(0, collided=True),
        looking_up(3, granularity="token"),
        looking_up(2, 4, granularity="block", recomputed_tokens=1),
        looking_up(0, 2, recomputed_tokens=1),
    ],
    bad_calls: [calling(KeyError("x"), KeyError), calling(None)],
    events: [
        reading(looking_up(2), FIRST),
        reading(looking_up(2), FIRST, FIRST),
        reading(looking_up(3, granularity="token"), FIRST),
        reading(looking_up(0, 2, recomputed_tokens=1), FIRST),
        reading(looking_up(0, collided=True), FIRST),
        reading(looking_up(KeyError(3))),
    ],
}
WRONG: Wrong = [
    (
        tier_lookups,
        looking_up_tiers(KeyError(3)),
        "match_tiers() of text 0, 4 tokens long, raised KeyError: 3",
    ),
    (tier_lookups, looking_up_tiers(6), "found 6, and only 4 of them are stored in any tier"),
    (tier_lookups, looking_up_tiers(0), "found 0, and 2 of them are stored"),
    (tier_lookups, looking_up_tiers(2, stored=True), "found 2, and 4 of them are stored"),
    (
        blocks_in_flight,
        moving(error=KeyError(3)),
        "transfers_in_flight() raised KeyError: 3",
    ),
    (
        blocks_in_flight,
        moving(Transfer(0, "store", (0,)), before=OTHER),
        "block 0 was written again, and store 0 of it is in flight",
    ),
    (
        blocks_in_flight,
        moving(Transfer("a", "load", (2,), 1), awaiting=1),
        "block 2 of sequence 0 is written by load 'a', in flight",
    ),
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
    (
        events,
        reading(looking_up(2)),
        "by its events, the cache stores 0 tokens of text 0, and match_prefix() finds 2",
    ),
    (
        events,
        reading(looking_up(2, collided=True), FIRST, BlockRemoved(["a"])),
        "stores 0 tokens of text 0, and match_prefix() finds 2 in whole blocks; the first block",
    ),
    (
        events,
        reading(looking_up(0), FIRST),
        "stores 2 tokens of text 0, and match_prefix() finds 0 in whole blocks; the first block",
    ),
    (
        events,
        reading(looking_up(0), BlockStored(["a"], None, [1])),
        "BlockStored, returned by events(): it has 1 token id for 1 block of 2",
    ),
    (
        events,
        reading(looking_up(2), FIRST, BlockStored(["a"], "b", [1, 1], 1)),
        "block 'a' comes after block 'b' in namespace 1, with token ids [1, 1], and is stored "
        "already: it came first, with token ids [1, 1]",
    ),
    (
        events,
        after(events=KeyError(3)),
        "events() raised KeyError: 3",
    ),
    (bad_calls, calling(None, **CHANGED), "a bad call changed the books"),
    (bad_calls, calling(None, arena=LATER), "changed what is stored in K"),
]
