"""Right and wrong observations for the invariants of stored tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer import Ledger, PrefixTraits, Tolerance
from pytest_roseinfer.capabilities.attention import attention, attention_by_formula
from pytest_roseinfer.capabilities.auxiliary_vectors import AuxiliaryVectors, auxiliary_vectors
from pytest_roseinfer.capabilities.payload import ANY_NAN, Payload
from pytest_roseinfer.capabilities.quantisation import unwritten_positions
from pytest_roseinfer.capabilities.reading import read_back, read_parts
from pytest_roseinfer.capabilities.states import StateNumbers, States, state_tokens, states
from pytest_roseinfer.capabilities.storage import arena
from pytest_roseinfer.capabilities.swapping import Stage, swap_state
from pytest_roseinfer.capabilities.writes import AppendPadded
from pytest_roseinfer.oracle.pages import padding_token, token_of
from tests.capabilities.invariants.observations import (
    CHANGED,
    LATER,
    NEW,
    PAYLOAD,
    QUERY,
    SPEC,
    STORED_BEFORE,
    WROTE_TWO,
    Right,
    Wrong,
    after,
    attending,
    declaring,
    observed,
    stored,
)

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.observation import Observation


def reading(found: Any) -> Observation:
    return after(reads={("gather", 1, 0): found})


def reading_first(found: Any) -> Observation:
    return after(first_reads={(0, 0, 2): found})


def with_state(length: int, error: Exception | None = None) -> Observation:
    """Return an observation in which sequence 0 has the state after its first tokens."""
    numbers, oracle = StateNumbers(), observed().oracle
    number = numbers.after_each(oracle.tokens(0))[length - 1]
    keys, _ = PAYLOAD.all_layers(state_tokens([number]))
    observation = after(states={0: error or keys[:, 0]})
    return replace(observation, notes={**observation.notes, States: numbers})


def with_vectors(tokens: list[int], error: Exception | None = None) -> Observation:
    """Return an observation in which sequence 0 has the auxiliary vectors of these tokens."""
    payload = Payload(replace(SPEC, num_heads=1), stream=1)
    vectors = payload.layer(tokens, 0)[0][:, 0]
    observation = after(auxiliary_vectors={(0, 0, 0): error or {"indexer key": vectors}})
    payloads = {"indexer key": payload}
    return replace(observation, notes={**observation.notes, AuxiliaryVectors: payloads})


def one_slot_late() -> Observation:
    observation = reading(PAYLOAD.layer([NEW], 0))
    return replace(
        observation, after=replace(observation.after, arena=stored((1, 1, token_of(1, 0))))
    )


def padded(*, scratch: frozenset[int]) -> Observation:
    """Return an observation in which a row of padding was written into block 3."""
    observation = after(arena=stored(*STORED_BEFORE, (2, 0, NEW), (3, 1, padding_token(1))))
    return replace(observation, operation=AppendPadded((0, None)), scratch_blocks=scratch)


def copied_back(stage: Stage) -> Observation:
    """Return an observation in which an absent sequence's block changed during a swap stage."""
    observation = after(arena=stored(*STORED_BEFORE, (2, 0, NEW), (1, 1, NEW)))
    state = swap_state(observation.oracle)
    state.stages[1], state.tokens[1] = stage, observation.oracle.tokens(1)
    return observation


def cached(*, value: int) -> Observation:
    """Return an observation in which block 3 is free and cached, and got this token."""
    kept = [Ledger({0: 1, 1: 1, 2: 1}, [3], 4, cached={3})]
    observation = after(ledgers=kept, arena=stored(*STORED_BEFORE, (2, 0, NEW), (3, 0, value)))
    before = replace(observation.before, ledgers=kept, arena=stored(*STORED_BEFORE, (3, 0, NEW)))
    return replace(
        observation,
        before=before,
        declared=declaring(prefixes=PrefixTraits(shares="equal prefixes")),
    )


def quantised(over: str = "token", *, token: int = 2, by: float = 0, **scaled: int) -> Observation:
    """Return an observation of a quantised cache in which a token and a scale changed.

    The token is off by the part ``by`` of its greatest value.
    """
    observation = replace(observed(), payload=Payload(SPEC, tolerance=Tolerance(1 / 250, over)))
    before_step = observation.payload.layer(observation.oracle.tokens(0), 0)
    after_step = before_step[0].clone(), before_step[1].clone()
    after_step[1][token, 1] += by * after_step[1][token].abs().max()
    old, new = torch.ones(1, 4, 2, 2), torch.ones(1, 4, 2, 2)
    new[0, scaled.get("block", 2), 1, scaled.get("position", 0)] = 2
    reads = {("peek", 0, 0): (before_step[0][:2], before_step[1][:2])}
    return replace(
        observation,
        before=replace(observation.before, reads=reads, scales=(old, old)),
        after=replace(observation.after, reads={("peek", 0, 0): after_step}, scales=(old, new)),
    )


RIGHT: Right = {
    read_back: [observed(), quantised(by=0.003), quantised("block", token=0, by=0.003)],
    read_parts: [observed(), reading_first(PAYLOAD.layer([token_of(0, 0), token_of(0, 1)], 0))],
    arena: [
        observed(),
        padded(scratch=frozenset({3})),
        cached(value=NEW),
        copied_back(Stage.SWAPPING_IN),
    ],
    unwritten_positions: [
        quantised(by=0.1),
        quantised("block", block=2, position=1),
        replace(quantised("block", token=0, by=0.001), outcome=WROTE_TWO),
    ],
    attention: [attending()],
    states: [with_state(3)],
    auxiliary_vectors: [with_vectors([token_of(0, 0), token_of(0, 1), NEW])],
}
WRONG: Wrong = [
    (
        states,
        with_state(2),
        "sequence 0, layer 0: expected the state after all of its 3 tokens, found that after the "
        "first 2",
    ),
    (states, with_state(3, KeyError(1)), "peek_state(0) raised KeyError: 1"),
    (
        auxiliary_vectors,
        with_vectors([token_of(0, 0), token_of(0, 0), NEW]),
        "sequence 0, layer 0, indexer key: position 1 (1 of 3 wrong): expected that of sequence "
        "0, token 1, found that of sequence 0, token 0: one position off",
    ),
    (
        auxiliary_vectors,
        with_vectors([NEW], KeyError(1)),
        "peek_auxiliary_vectors(0, 0) raised KeyError: 1",
    ),
    (
        read_parts,
        reading_first(KeyError(1)),
        "gather_first of 2 tokens of sequence 0, layer 0, raised KeyError: 1",
    ),
    (
        read_parts,
        reading_first(PAYLOAD.layer([token_of(0, 0), NEW], 0)),
        "gather_first of 2 tokens: sequence 0, layer 0, K: position 1, head 0",
    ),
    (
        read_parts,
        reading_first(PAYLOAD.layer([token_of(0, 0), token_of(0, 1), NEW], 0)),
        "expected shape [2, 2, 4], found [3, 2, 4]",
    ),
    (read_back, reading(KeyError(1)), "gather(1, 0) raised KeyError: 1"),
    (read_back, reading(PAYLOAD.layer([token_of(1, 0), NEW], 0)), "found [2, 2, 4]"),
    (
        read_back,
        reading(PAYLOAD.layer([NEW], 0)),
        "gather: sequence 1, layer 0, K: position 0, head 0 (2 of 2 wrong): expected sequence 1, "
        "token 0, found sequence 0, token 2",
    ),
    (
        read_back,
        one_slot_late(),
        "token 2; the right one lies in block 1, position 1",
    ),
    (
        read_back,
        quantised(by=0.1),
        "V: position 2, head 1 (1 of 6 wrong): expected sequence 0, token 2",
    ),
    (
        unwritten_positions,
        quantised(token=1, by=0.001),
        "peek: sequence 0, layer 0, V: position 1, head 1 reads back",
    ),
    (
        unwritten_positions,
        replace(quantised(token=0, by=0.001), outcome=WROTE_TWO),
        "peek: sequence 0, layer 0, V: position 0, head 1 reads back",
    ),
    (
        unwritten_positions,
        quantised(block=1, position=1),
        "layer 0, V, block 1, head 1: the scale is 2, and was 1 before the step",
    ),
    (
        arena,
        after(arena=stored(*STORED_BEFORE)),
        "block 2, position 0, head 0: expected sequence 0, token 2",
    ),
    (
        arena,
        after(arena=LATER),
        f"block 3, position 1, head 0: expected {ANY_NAN}, found sequence 1",
    ),
    (arena, cached(value=token_of(1, 0)), "block 3, position 0, head 0: expected sequence 0, tok"),
    (
        arena,
        padded(scratch=frozenset()),
        f"block 3, position 1, head 0: expected {ANY_NAN}, found bits",
    ),
    (arena, copied_back(Stage.SWAPPING_OUT), "block 1, position 1"),
    (attention, attending(IndexError("row")), "attend([0], query, 0) raised IndexError: row"),
    (attention, attending(QUERY[:, :2]), "attend: expected shape [1, 4, 4], found [1, 2, 4]"),
    (
        attention,
        attending(attention_by_formula(QUERY[0], *PAYLOAD.layer([token_of(1, 0)], 0))[None]),
        "as it would be over sequence 1",
    ),
    (attention, attending(**CHANGED), "attend changed the books"),
    (attention, attending(arena=LATER), "attend changed what is stored"),
]
