"""Right and wrong observations for the invariants of a cache's books."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_roseinfer import Ledger, PrefixTraits
from pytest_roseinfer.capabilities.block_tables import lookahead, ownership
from pytest_roseinfer.capabilities.cached_blocks import (
    CachedBlocks,
    CachedBlocksNote,
    ReleasedBlock,
    evictions,
    needless_evictions,
)
from pytest_roseinfer.capabilities.epochs import Reset, refused_resets
from pytest_roseinfer.capabilities.observation import Observation, Outcome, Snapshot
from pytest_roseinfer.capabilities.preemption import preempted
from pytest_roseinfer.capabilities.shards import shards
from pytest_roseinfer.capabilities.storage import separate_containers
from pytest_roseinfer.capabilities.swapping import Stage, swap_space, swap_state
from pytest_roseinfer.capabilities.windows import windows
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.oracle.pages import Page, Windows, Written, token_of
from tests.capabilities.invariants.observations import (
    CHANGED,
    NEW,
    PAYLOAD,
    SPEC,
    Right,
    Wrong,
    after,
    declaring,
    observed,
)


def swapping(blocks_in_use: int | None) -> Observation:
    """Return an observation with three tokens swapped out and so many swap blocks in use."""
    observation = after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [3], 4, swapped=blocks_in_use)])
    state = swap_state(observation.oracle)
    state.stages[5], state.tokens[5] = Stage.SWAPPED_OUT, [1, 2, 3]
    preempted(observation.oracle)[6] = [4]
    return observation


def looking_ahead(*blocks: int) -> Observation:
    """Return an observation in which sequence 1 has these blocks after its last one."""
    observation = after(tables={(0, 0): [0, 2], (1, 0): [1, *blocks]})
    held = {0: 1, 1: 1, 2: 1, **{block: 1 + (block == 2) for block in blocks}}
    free = sorted({*range(4)} - {*held})
    snapshot = replace(observation.after, ledgers=[Ledger(held, free, 4)])
    return replace(observation, after=snapshot, declared=declaring(lookahead_blocks=1))


def with_free_count(num_free: int) -> Observation:
    return after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [3], 4, num_free=num_free)])


def with_eviction(
    released_2: ReleasedBlock, released_3: ReleasedBlock, **traits: Any
) -> Observation:
    """Return an observation in which blocks 2 and 3 were cached, and block 2 was evicted."""
    observation = after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [3], 4, {3})])
    traits = {"shares": "equal prefixes", "evicts": "least recent", **traits}
    notes = {CachedBlocks: CachedBlocksNote(released={2: released_2, 3: released_3})}
    return replace(observation, notes=notes, declared=declaring(prefixes=PrefixTraits(**traits)))


def with_needed_blocks(needed: int | None, spare: int, **traits: Any) -> Observation:
    """Return an observation in which block 2 was evicted by a write that needs so many blocks."""
    traits = {"evicts_when": "needed", **traits}
    released_2 = ReleasedBlock(1, 0, tokens=OTHER_TOKENS)
    observation = with_eviction(released_2, ReleasedBlock(2, 0), **traits)
    released = observation.notes[CachedBlocks].released
    note = CachedBlocksNote(released=released, needed=needed, spare=spare)
    return replace(observation, notes={CachedBlocks: note})


def with_shared_block(page: list[int]) -> Observation:
    """Return an observation in which sequences 0 and 1 share block 0, with sequence 1's tokens."""
    observation = after(tables=SHARED, ledgers=[Ledger({0: 2, 2: 1}, [1, 3], 4)])
    observation.oracle.sequences[1] = [Page(page)]
    return replace(observation, declared=declaring(prefixes=PrefixTraits(shares="equal prefixes")))


def on_ranks(**second_rank: Any) -> Observation:
    """Return an observation of two ranks whose books differ as given for the second rank."""
    first_rank = observed().after
    return after(shards=[first_rank, replace(first_rank, **second_rank)])


def windowed(tables: dict[tuple[int, int], list[int | None]], *of_layer: int | None) -> Observation:
    """Return an observation in which the last of three tokens is live in a window of 2."""
    spec = replace(SPEC, num_layers=len(of_layer), windows=of_layer)
    oracle = Oracle(SPEC.block_size, 8, windows=Windows(of_layer, shared_pool=True))
    oracle.append([(0, 3)], range(3))
    return Observation(
        spec=spec,
        declared=declaring(),
        after=Snapshot(tables=tables),
        oracle=oracle,
        payload=PAYLOAD,
    )


def resetting(found_after: int, *, fits: bool = False) -> Observation:
    """Return an observation of a reset, after which so many of two found tokens are found."""
    return replace(
        observed(),
        operation=Reset(),
        before=Snapshot(matches={(0, 3): 2}),
        outcome=Outcome(fits),
        after=Snapshot(matches={(0, 3): found_after, (0, 4): 2}),
    )


OTHER_TOKENS, SAME_OWNER = (token_of(3, 0), token_of(3, 1)), frozenset({3})
SHARED = {(0, 0): [0, 2], (1, 0): [0]}
ONE_LIST = [0]

RIGHT: Right = {
    windows: [windowed({(0, 0): [None, 1], (0, 1): [2, 3]}, 2, None)],
    ownership: [
        observed(),
        with_free_count(1),
        with_shared_block([token_of(0, 0), token_of(0, 1)]),
        looking_ahead(3),
        looking_ahead(),
    ],
    lookahead: [observed(), looking_ahead(3), looking_ahead()],
    swap_space: [swapping(2), swapping(0), swapping(None), observed()],
    shards: [on_ranks(), on_ranks(ledgers=[Ledger({2: 1, 1: 1, 0: 1}, (3,), 4)])],
    needless_evictions: [
        with_needed_blocks(2, 1),
        with_needed_blocks(None, 0),
        with_needed_blocks(1, 1, evicts_when="any time"),
        replace(
            with_needed_blocks(2, 1),
            outcome=Outcome(fits=False, written=Written(((0, 1),), (NEW,))),
        ),
        replace(observed(), notes={CachedBlocks: CachedBlocksNote(needed=1, spare=2)}),
    ],
    evictions: [
        observed(),
        with_eviction(ReleasedBlock(1, 0, tokens=OTHER_TOKENS), ReleasedBlock(2, 0)),
        with_eviction(
            ReleasedBlock(1, 1, SAME_OWNER, OTHER_TOKENS), ReleasedBlock(1, 0, SAME_OWNER)
        ),
        with_eviction(
            ReleasedBlock(1, 0, frozenset({3}), OTHER_TOKENS), ReleasedBlock(1, 1, frozenset({4}))
        ),
        with_eviction(ReleasedBlock(2, 0, tokens=(NEW,)), ReleasedBlock(1, 0)),
        with_eviction(ReleasedBlock(2, 0, tokens=OTHER_TOKENS), ReleasedBlock(1, 0), evicts="any"),
    ],
    separate_containers: [
        observed(),
        after(containers={0: 1, 1: 0}),
        after(containers={0: [0, 2], 1: [0, 2]}),
    ],
    refused_resets: [
        observed(),
        resetting(2),
        resetting(0, fits=True),
        replace(resetting(0), operation=observed().operation),
    ],
}
WRONG: Wrong = [
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
        ownership,
        after(**CHANGED),
        "layer 0: block 2 has refcount 2, and tables name it 1 time (sequence 0)",
    ),
    (ownership, after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [3, 3], 4)]), "names a block twice"),
    (
        ownership,
        after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [2], 4)]),
        "layer 0: block 2 is free, and held (sequence 0)",
    ),
    (ownership, after(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [], 4)]), "are not the 4 there are"),
    (
        ownership,
        with_free_count(2),
        "layer 0: the cache counts 2 free blocks, and has 1",
    ),
    (
        shards,
        on_ranks(ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [3], 4, num_free=2)]),
        "rank 1, layer 0: 2 free blocks are counted, and None on rank 0",
    ),
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
    (ownership, looking_ahead(3, 2), "sequence 1 has 3 blocks for 1 tokens; 1 to 2 are right"),
    (
        lookahead,
        looking_ahead(2),
        "layer 0: block 2 is shared, and is a look-ahead block of sequence 1 (sequences 0, 1)",
    ),
    (
        ownership,
        with_shared_block([token_of(0, 0), NEW]),
        "block 0 of sequence 1 is shared with a sequence",
    ),
    (
        needless_evictions,
        with_needed_blocks(1, 1),
        "block 2 was evicted, though the write needs 1 block at most, and 1 that are not cached",
    ),
    (
        needless_evictions,
        replace(with_needed_blocks(2, 1), outcome=Outcome(fits=False)),
        "block 2 was evicted, by a step that was refused, which must change nothing",
    ),
    (
        evictions,
        with_eviction(ReleasedBlock(2, 0, tokens=OTHER_TOKENS), ReleasedBlock(1, 0)),
        "block 2 was evicted and block 3 was not, which was released earlier, in step 1 and not",
    ),
    (
        evictions,
        with_eviction(
            ReleasedBlock(1, 0, SAME_OWNER, OTHER_TOKENS), ReleasedBlock(1, 1, SAME_OWNER)
        ),
        "was released with it and is nearer to the end: index 1 comes after 0",
    ),
    (
        swap_space,
        swapping(3),
        "3 blocks of swap space are in use, and sequences swapped out need 2",
    ),
    (separate_containers, after(containers={0: 3, 1: 3}), "sequences 0 and 1 are kept in slot 3"),
    (
        separate_containers,
        after(containers={0: ONE_LIST, 1: ONE_LIST}),
        "sequences 0 and 1 are kept in the same list",
    ),
    (
        separate_containers,
        after(containers={0: 1, 1: KeyError(1)}),
        "container(1) raised KeyError: 1",
    ),
    (
        refused_resets,
        resetting(0),
        "a refused reset changed the result of match_prefix() for text 0, 3 tokens long, from 2 to",
    ),
]
