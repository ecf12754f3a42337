"""Every invariant passes an observation of a right cache, and finds its fault in a wrong one.

The cache has blocks of two tokens. Sequence 0 just got its third token, which began block 2;
sequence 1 has one token, in block 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_roseinfer import BadCall, CacheSpec, FastPath, Ledger, Oracle, Tolerance
from pytest_roseinfer.away import Stage
from pytest_roseinfer.cases.operations.writes.append import Append
from pytest_roseinfer.cases.operations.writes.append_padded import AppendPadded
from pytest_roseinfer.cases.payload import Payload
from pytest_roseinfer.findings.observation import (
    Attended,
    Declared,
    Observation,
    Outcome,
    Snapshot,
)
from pytest_roseinfer.findings.released import Released
from pytest_roseinfer.invariants.bad_calls import bad_calls
from pytest_roseinfer.invariants.books.evictions import evictions
from pytest_roseinfer.invariants.books.given_back import windows
from pytest_roseinfer.invariants.books.kept_apart import kept_apart
from pytest_roseinfer.invariants.books.ownership import ownership
from pytest_roseinfer.invariants.books.shards import shards
from pytest_roseinfer.invariants.books.swap_space import swap_space
from pytest_roseinfer.invariants.counts import counts
from pytest_roseinfer.invariants.invariant import INVARIANTS
from pytest_roseinfer.invariants.lookups import lookups
from pytest_roseinfer.invariants.own_conditions import own_conditions
from pytest_roseinfer.invariants.refused import refused
from pytest_roseinfer.invariants.stored.arena import arena
from pytest_roseinfer.invariants.stored.attention import attention, attention_by_formula
from pytest_roseinfer.invariants.stored.read_back import read_back
from pytest_roseinfer.invariants.stored.untouched import untouched
from pytest_roseinfer.oracle import Page, Written, padding_token, token_of
from pytest_roseinfer.windows import Windows

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer.findings.observation import Pair

SPEC = CacheSpec(num_layers=1, num_heads=2, head_dim=4, block_size=2, num_blocks=4)
PAYLOAD = Payload(SPEC)
DECLARED = Declared(
    paths={"fast": FastPath("slow", never_with=[{"fast": False}], one_position=True)},
    conditions=("fresh", "full", "last_position"),
    row_conditions={"fresh": "fresh", "rollover": "full"},
)
NEW = token_of(0, 2)


def stored(*tokens: tuple[int, int, int]) -> Pair:
    """Return an arena of poison with each (block, position, token) in it."""
    keys, values = (torch.full((1, 4, 2, 2, 4), float("nan")) for _ in range(2))
    for block, position, token in tokens:
        key, value = PAYLOAD.layer([token], 0)
        keys[0, block, :, position], values[0, block, :, position] = key[0], value[0]
    return keys, values


OTHERS, TOGETHER = (token_of(3, 0), token_of(3, 1)), frozenset({3})
OLD = [(0, 0, token_of(0, 0)), (0, 1, token_of(0, 1)), (1, 0, token_of(1, 0))]


def observed() -> Observation:
    """Return an observation of a right cache."""
    oracle = Oracle(SPEC.block_size, SPEC.num_blocks)
    rows = [(0, 2), (1, 1)]
    oracle.append(rows, oracle.new_tokens(rows))
    oracle.append([(0, 1)], [NEW])
    reads = {("peek", seq, 0): PAYLOAD.layer(oracle.tokens(seq), 0) for seq in oracle.sequences}
    return Observation(
        spec=SPEC,
        operation=Append((0,)),
        before=Snapshot(
            tables={(0, 0): [0], (1, 0): [1]},
            ledgers=[Ledger({0: 1, 1: 1}, [2, 3], 4)],
            arena=stored(*OLD),
            counts=Counter(fast=4, fresh=2),
        ),
        outcome=Outcome(True, {"fast": True}, Written([(0, 1)], [NEW]), Counter(rollover=1)),
        after=Snapshot(
            reads=reads,
            tables={(0, 0): [0, 2], (1, 0): [1]},
            ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [3], 4)],
            arena=stored(*OLD, (2, 0, NEW)),
            counts=Counter(fast=5, fresh=2, full=1),
        ),
        oracle=oracle,
        payload=PAYLOAD,
        seen={token for _, _, token in OLD} | {NEW},
        declared=DECLARED,
    )


def after(**shown: Any) -> Observation:
    """Return the same with something else in the cache afterwards."""
    seen = observed()
    return replace(seen, after=replace(seen.after, **shown))


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


def reading(found: Any) -> Observation:
    return after(reads={("gather", 1, 0): found})


def counting(**counted: int) -> Observation:
    return after(counts=Counter(counted))


def padded(*, scratch: frozenset[int]) -> Observation:
    """A row of padding was written into block 3."""
    declared = replace(DECLARED, scratch_blocks=scratch)
    seen = after(arena=stored(*OLD, (2, 0, NEW), (3, 1, padding_token(1))))
    return replace(seen, operation=AppendPadded((0, None)), declared=declared)


def looking_up(found: Any, count: int = 3, **declared: Any) -> Observation:
    """Text 0 was looked up, whose first three tokens are in blocks 0 and, in part, 2."""
    said = Oracle(SPEC.block_size, SPEC.num_blocks, branches=((0, 0),))
    held = said.text_tokens(0, 3)
    return replace(
        after(matched={(0, count): found}),
        oracle=said,
        contents={0: held[:2], 1: [token_of(1, 0)], 2: held[2:]},
        declared=replace(DECLARED, sharing="equal prefixes", **declared),
    )


def swapped(taken: int | None) -> Observation:
    """Sequence 5 is swapped out with three tokens, and so many blocks of swap space are taken."""
    seen = after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [3], 4, swapped=taken)])
    seen.oracle.away.leave(5, Stage.OUT, [1, 2, 3])
    seen.oracle.away.leave(6, Stage.PREEMPTED, [4])
    return seen


def copied_back(stage: Stage) -> Observation:
    """The block of sequence 1 got what sequence 0 says, while sequence 1 was away like this."""
    seen = after(arena=stored(*OLD, (2, 0, NEW), (1, 1, NEW)))
    seen.oracle.away.leave(1, stage, seen.oracle.tokens(1))
    return seen


def evicting(of_2: Released, of_3: Released, **declared: Any) -> Observation:
    """Blocks 2 and 3 were cached, and the first of them was taken."""
    seen = after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [3], 4, {3})])
    declared = {"sharing": "equal prefixes", "evicts": "least recent", **declared}
    return replace(seen, released={2: of_2, 3: of_3}, declared=replace(DECLARED, **declared))


def sharing(page: list[int]) -> Observation:
    """Sequences 0 and 1 share block 0, where sequence 1 has these tokens."""
    seen = after(tables=SHARED, ledgers=[Ledger({0: 2, 2: 1}, [1, 3], 4)])
    seen.oracle.sequences[1] = [Page(page)]
    return replace(seen, declared=replace(DECLARED, sharing="equal prefixes"))


def cached(*, value: int) -> Observation:
    """Block 3 is free and kept for later texts, and got this token."""
    kept = [Ledger({0: 1, 1: 1, 2: 1}, [3], 4, cached={3})]
    seen = after(ledgers=kept, arena=stored(*OLD, (2, 0, NEW), (3, 0, value)))
    before = replace(seen.before, ledgers=kept, arena=stored(*OLD, (3, 0, NEW)))
    return replace(seen, before=before, declared=replace(DECLARED, sharing="equal prefixes"))


def quantised(over: str = "token", *, token: int = 2, by: float = 0, **scaled: int) -> Observation:
    """A quantised cache reads back one token of sequence 0 as it was not before, and a scale too.

    Such a token is off by a part of its greatest value.
    """
    seen = replace(observed(), payload=Payload(SPEC, tolerance=Tolerance(1 / 250, over)))
    was = seen.payload.layer(seen.oracle.tokens(0), 0)
    now = was[0].clone(), was[1].clone()
    now[1][token, 1] += by * now[1][token].abs().max()
    old, new = torch.ones(1, 4, 2, 2), torch.ones(1, 4, 2, 2)
    new[0, scaled.get("block", 2), 1, scaled.get("position", 0)] = 2
    reads = {("peek", 0, 0): (was[0][:2], was[1][:2])}
    return replace(
        seen,
        before=replace(seen.before, reads=reads, scales=(old, old)),
        after=replace(seen.after, reads={("peek", 0, 0): now}, scales=(old, new)),
    )


def on_ranks(**shown: Any) -> Observation:
    """Two ranks keep the cache; the second shows something else in its books."""
    books = observed().after
    return after(shards=[books, replace(books, **shown)])


WROTE_TWO = Outcome(True, {}, Written([(0, 2)], [token_of(0, 1), NEW]), Counter(rollover=1))
QUERY = torch.linspace(-1, 1, 16).view(1, 4, 4)


def attending(found: Any = None, **shown: Any) -> Observation:
    """Sequence 0 was asked for attention, with two query heads to a KV head."""
    seen = after(**shown)
    if found is None:
        found = attention_by_formula(QUERY[0], *PAYLOAD.layer(seen.oracle.tokens(0), 0))[None]
    answer = Attended([0], 0, QUERY, found)
    asked = Outcome(options={"fast": True})
    return replace(seen, operation=None, before=observed().after, outcome=asked, attended=[answer])


def calling(
    raised: BaseException | None, *errors: type[BaseException], **shown: Any
) -> Observation:
    seen = after(**shown)
    bad = BadCall("a bad call", lambda: None, errors)
    return replace(seen, operation=None, before=observed().after, bad_call=bad, raised=raised)


def windowed(tables: dict[tuple[int, int], list[int | None]], *of_layer: int | None) -> Observation:
    """Sequence 0 has three tokens, of which the last is live in a window of 2."""
    spec = replace(SPEC, num_layers=len(of_layer), windows=of_layer)
    oracle = Oracle(SPEC.block_size, 8, windows=Windows(of_layer, shared_pool=True))
    oracle.append([(0, 3)], range(3))
    return Observation(spec=spec, after=Snapshot(tables=tables), oracle=oracle, payload=PAYLOAD)


SHARED = {(0, 0): [0, 2], (1, 0): [0]}
LATER = stored((3, 1, token_of(1, 0)), *OLD, (2, 0, NEW))
CHANGED = {"ledgers": [Ledger({0: 1, 1: 1, 2: 2}, [3], 4)]}

SAME = [0]
RIGHT: dict[Callable[[Observation], Any], list[Observation]] = {
    windows: [windowed({(0, 0): [None, 1], (0, 1): [2, 3]}, 2, None)],
    read_back: [observed(), quantised(by=0.003), quantised("block", token=0, by=0.003)],
    ownership: [observed(), sharing([token_of(0, 0), token_of(0, 1)])],
    refused: [
        observed(),
        refusing(),
        refusing(ledgers=[Ledger({0: 1, 1: 1}, [3, 2], 4)]),
        refusing_in_part(),
    ],
    arena: [
        observed(),
        padded(scratch=frozenset({3})),
        cached(value=NEW),
        copied_back(Stage.COMING),
    ],
    swap_space: [swapped(2), swapped(0), swapped(None), observed()],
    counts: [
        observed(),
        attending(counts=observed().after.counts + Counter(fast=1)),
        replace(counting(fast=4, fresh=2, full=1), declared=replace(DECLARED, paths={})),
    ],
    own_conditions: [observed()],
    lookups: [
        looking_up(2),
        looking_up(0, match_finds="some"),
        looking_up(3, match_granularity="token"),
        looking_up(2, 4, match_granularity="block", match_leaves=1),
        looking_up(0, 2, match_leaves=1),
    ],
    shards: [on_ranks(), on_ranks(ledgers=[Ledger({2: 1, 1: 1, 0: 1}, (3,), 4)])],
    untouched: [
        quantised(by=0.1),
        quantised("block", block=2, position=1),
        replace(quantised("block", token=0, by=0.001), outcome=WROTE_TWO),
    ],
    evictions: [
        observed(),
        evicting(Released(1, 0, tokens=OTHERS), Released(2, 0)),
        evicting(Released(1, 1, TOGETHER, OTHERS), Released(1, 0, TOGETHER)),
        evicting(Released(1, 0, frozenset({3}), OTHERS), Released(1, 1, frozenset({4}))),
        evicting(Released(2, 0, tokens=(NEW,)), Released(1, 0)),
        evicting(Released(2, 0, tokens=OTHERS), Released(1, 0), evicts="any"),
    ],
    kept_apart: [observed(), after(kept={0: 1, 1: 0}), after(kept={0: [0, 2], 1: [0, 2]})],
    attention: [attending()],
    bad_calls: [calling(KeyError("x"), KeyError), calling(None)],
}
WRONG: list[tuple[Callable[[Observation], Any], Observation, str]] = [
    (windows, windowed({(0, 0): [0, 1]}, 2), "block 0 of its table is 0, and must be None"),
    (windows, windowed({(0, 0): [None, None]}, 2), "is to be held: tokens from 2 on are live"),
    (windows, windowed({(0, 0): [None]}, 2), "has 1 blocks for 3 tokens; 2 are right"),
    (
        windows,
        windowed({(0, 0): [None, 1], (0, 1): [2, 1]}, 2, None),
        "blocks [1] of layer 0 are held in another group",
    ),
    (
        windows,
        windowed({(0, 0): [None, 1], (0, 1): [None, 2]}, 2, 2),
        "layers 0 and 1 have one window and different tables",
    ),
    (read_back, reading(KeyError(1)), "gather(1, 0) raised KeyError: 1"),
    (read_back, reading(PAYLOAD.layer([token_of(1, 0), NEW], 0)), "found [2, 2, 4]"),
    (
        read_back,
        reading(PAYLOAD.layer([NEW], 0)),
        "gather: sequence 1, layer 0, K: position 0, head 0 (2 of 2 wrong): expected sequence 1, "
        "token 0, layer 0, head 0, K, found sequence 0, token 2, layer 0, head 0, K",
    ),
    (
        read_back,
        quantised(by=0.1),
        "V: position 2, head 1 (1 of 6 wrong): expected sequence 0, token 2",
    ),
    (
        shards,
        on_ranks(tables={(0, 0): [0, 3], (1, 0): [1]}),
        "rank 1, layer 0: block 1 of sequence 0 is block 3, and block 2 on rank 0",
    ),
    (
        shards,
        on_ranks(tables={(0, 0): [0], (1, 0): [1]}),
        "rank 1, layer 0: sequence 0 has 1 blocks, and 2 on rank 0",
    ),
    (
        shards,
        on_ranks(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [], 3)]),
        "rank 1, layer 0: there are 3 blocks, and 4 on rank 0",
    ),
    (shards, on_ranks(**CHANGED), "rank 1, layer 0: block 2 has 2 holders, and 1 on rank 0"),
    (
        shards,
        on_ranks(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [], 4)]),
        "rank 1, layer 0: block 3 is not free, and free on rank 0",
    ),
    (
        untouched,
        quantised(token=1, by=0.001),
        "peek: sequence 0, layer 0, V: position 1, head 1 reads back",
    ),
    (
        untouched,
        replace(quantised(token=0, by=0.001), outcome=WROTE_TWO),
        "peek: sequence 0, layer 0, V: position 0, head 1 reads back",
    ),
    (
        untouched,
        quantised(block=1, position=1),
        "layer 0, V, block 1, head 1: the scale is 2, and was 1 before the step",
    ),
    (ownership, after(**CHANGED), "layer 0: refcounts {0: 1, 1: 1, 2: 2} but the tables hold"),
    (ownership, after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [3, 3], 4)]), "names a block twice"),
    (ownership, after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [2], 4)]), "[2] are free and held"),
    (ownership, after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [], 4)]), "are not the 4 there are"),
    (
        ownership,
        after(tables=SHARED, ledgers=[Ledger({0: 2, 2: 1}, [1, 3], 4)]),
        "block 0 of sequence 1 is shared with a sequence that must have one of its own by now",
    ),
    (
        ownership,
        after(tables={(0, 0): [0], (1, 0): [1]}, ledgers=observed().before.ledgers),
        "sequence 0 has 1 blocks for 3 tokens; 2 are right",
    ),
    (ownership, sharing([token_of(0, 0), NEW]), "block 0 of sequence 1 is shared with a sequence"),
    (lookups, looking_up(KeyError(3)), "matched() of text 0, 3 tokens long, raised KeyError: 3"),
    (lookups, looking_up(4, 4), "found 4, and only 2 of them may be found now"),
    (lookups, looking_up(0), "found 0, though 2 of them are stored"),
    (lookups, looking_up(2, 2, match_leaves=1), "found 2, and only 0 of them may be found now"),
    (lookups, looking_up(1, match_finds="some"), "found 1, which are no whole blocks"),
    (
        lookups,
        looking_up(2, match_granularity="token"),
        "found 2, though 3 of them are stored",
    ),
    (
        evictions,
        evicting(Released(2, 0, tokens=OTHERS), Released(1, 0)),
        "block 2 was evicted and block 3 was not, which was released earlier, in step 1 and not",
    ),
    (
        evictions,
        evicting(Released(1, 0, TOGETHER, OTHERS), Released(1, 1, TOGETHER)),
        "was released with it and lies nearer to the tail: 1 is behind 0",
    ),
    (refused, refusing(tables=observed().after.tables), "found no room changed the books"),
    (arena, after(arena=stored(*OLD)), "block 2, position 0, head 0: expected sequence 0, token 2"),
    (arena, after(arena=LATER), "block 3, position 1, head 0: expected poison, found sequence 1"),
    (arena, cached(value=token_of(1, 0)), "block 3, position 0, head 0: expected sequence 0, tok"),
    (
        arena,
        padded(scratch=frozenset()),
        "block 3, position 1, head 0: expected poison, found bits",
    ),
    (counts, counting(fast=5, fresh=2, full=1, odd=1), "path 'odd' ran and is not declared"),
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
        replace(observed(), outcome=Outcome(True, {}, None, Counter(rollover=1))),
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
    (arena, copied_back(Stage.LEAVING), "block 1, position 1"),
    (swap_space, swapped(3), "3 blocks of swap space are taken, and what is swapped out fills 2"),
    (kept_apart, after(kept={0: 3, 1: 3}), "sequences 0 and 1 are kept in slot 3"),
    (kept_apart, after(kept={0: SAME, 1: SAME}), "sequences 0 and 1 are kept in the same list"),
    (kept_apart, after(kept={0: 1, 1: KeyError(1)}), "kept_in(1) raised KeyError: 1"),
    (attention, attending(IndexError("row")), "attend([0], query, 0) raised IndexError: row"),
    (attention, attending(QUERY[:, :2]), "attend: expected shape [1, 4, 4], found [1, 2, 4]"),
    (
        attention,
        attending(attention_by_formula(QUERY[0], *PAYLOAD.layer([token_of(1, 0)], 0))[None]),
        "as it would be over sequence 1",
    ),
    (attention, attending(**CHANGED), "attend changed the books"),
    (attention, attending(arena=LATER), "attend changed what is stored"),
    (bad_calls, calling(None, KeyError), "a bad call went through; it must raise KeyError"),
    (bad_calls, calling(ValueError("x"), KeyError), "a bad call raised ValueError: x"),
    (bad_calls, calling(None, **CHANGED), "a bad call changed the books"),
    (bad_calls, calling(None, arena=LATER), "changed what is stored in K"),
]


def test_every_invariant_is_tried_here() -> None:
    tried = {check.__name__ for check in RIGHT}
    assert tried == {check.__name__ for check, _, _ in WRONG} == {each.name for each in INVARIANTS}


@pytest.mark.parametrize("check", RIGHT, ids=lambda check: check.__name__)
def test_what_is_right_passes(check: Callable[[Observation], Any]) -> None:
    assert [check(seen) for seen in RIGHT[check]] == [None] * len(RIGHT[check])


@pytest.mark.parametrize(("check", "seen", "said"), WRONG, ids=[case[2][:40] for case in WRONG])
def test_what_is_wrong_is_found(
    check: Callable[[Observation], Any], seen: Observation, said: str
) -> None:
    finding = check(seen)
    assert finding is not None
    assert said in finding.what
