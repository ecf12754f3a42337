"""A right observation, and variants of it.

The cache has blocks of two tokens. Sequence 0 just got its third token, which began block 2;
sequence 1 has one token, in block 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer import CacheSpec, FastPath, Ledger, Oracle
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.attention import attention_by_formula
from pytest_roseinfer.capabilities.counting import RowConditions
from pytest_roseinfer.capabilities.observation import (
    AttentionOutput,
    Invariant,
    Observation,
    Outcome,
    Snapshot,
)
from pytest_roseinfer.capabilities.payload import Payload
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.oracle.pages import Written, token_of

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.observation import Pair

Right = dict[Invariant, list[Observation]]
"""Observations that each invariant must pass."""
Wrong = list[tuple[Invariant, Observation, str]]
"""Invariants, each with an observation that it must fail, and a part of its message."""

SPEC = CacheSpec(num_layers=1, num_heads=2, head_dim=4, block_size=2, num_blocks=4)
PAYLOAD = Payload(SPEC)
DECLARED = {
    "paths": {"fast": FastPath("slow", never_with=[{"fast": False}], one_position=True)},
    "conditions": ("fresh", "full", "last_position"),
    "row_conditions": {"fresh": "fresh", "rollover": "full"},
}
NEW = token_of(0, 2)


def declaring(**declarations: Any) -> type[KVCacheAdapter]:
    """Return an adapter that declares these attributes."""
    return type("Declares", (KVCacheAdapter,), {**DECLARED, **declarations})


def stored(*tokens: tuple[int, int, int]) -> Pair:
    """Return a poisoned arena that stores each (block, position, token)."""
    keys, values = (torch.full((1, 4, 2, 2, 4), float("nan")) for _ in range(2))
    for block, position, token in tokens:
        key, value = PAYLOAD.layer([token], 0)
        keys[0, block, :, position], values[0, block, :, position] = key[0], value[0]
    return keys, values


STORED_BEFORE = [(0, 0, token_of(0, 0)), (0, 1, token_of(0, 1)), (1, 0, token_of(1, 0))]


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
            arena=stored(*STORED_BEFORE),
            counts=Counter(fast=4, fresh=2),
        ),
        outcome=Outcome(True, {"fast": True}, Written([(0, 1)], [NEW])),
        notes={RowConditions: Counter(rollover=1)},
        after=Snapshot(
            reads=reads,
            tables={(0, 0): [0, 2], (1, 0): [1]},
            ledgers=[Ledger({0: 1, 1: 1, 2: 1}, [3], 4)],
            arena=stored(*STORED_BEFORE, (2, 0, NEW)),
            counts=Counter(fast=5, fresh=2, full=1),
        ),
        oracle=oracle,
        payload=PAYLOAD,
        first_writers=dict.fromkeys([*(token for _, _, token in STORED_BEFORE), NEW], 0),
        declared=declaring(),
    )


def after(**attributes: Any) -> Observation:
    """Return an observation with other attributes of the snapshot after the step."""
    observation = observed()
    return replace(observation, after=replace(observation.after, **attributes))


LATER = stored((3, 1, token_of(1, 0)), *STORED_BEFORE, (2, 0, NEW))
CHANGED = {"ledgers": [Ledger({0: 1, 1: 1, 2: 2}, [3], 4)]}
WROTE_TWO = Outcome(True, {}, Written([(0, 2)], [token_of(0, 1), NEW]))
QUERY = torch.linspace(-1, 1, 16).view(1, 4, 4)


def attending(found: Any = None, **attributes: Any) -> Observation:
    """Return an observation of attention for sequence 0, with two query heads to a KV head."""
    observation = after(**attributes)
    if found is None:
        found = attention_by_formula(QUERY[0], *PAYLOAD.layer(observation.oracle.tokens(0), 0))[
            None
        ]
    answer = AttentionOutput([0], 0, QUERY, found)
    outcome = Outcome(options={"fast": True})
    return replace(
        observation,
        operation=None,
        before=observed().after,
        outcome=outcome,
        notes={},
        answers=[answer],
    )
