"""Right and wrong observations for the invariants of disaggregation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import Ledger, PrefixTraits, Transfer
from pytest_roseinfer.capabilities.remote_prompts import (
    Receive,
    RemoteShape,
    blocks_of_receives,
    receive_statuses,
    remote_blocks,
    remote_of,
    remote_prompts,
)
from pytest_roseinfer.oracle.pages import token_of
from tests.capabilities.invariants.observations import (
    PAYLOAD,
    Right,
    Wrong,
    declaring,
    observed,
)

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.observation import Observation

PUSH = Transfer(7, "receive", (1,), 1)
"""A transfer to the block of sequence 1, which is being received."""
LATE = replace(PUSH, blocks=(3,), seq=None)
"""A transfer for a receive that was cancelled."""


def receiving(
    *transfers: Transfer, written: int = 1, lost: int = 0, leaving: int = 0, **shown: Any
) -> Observation:
    """Return an observation in which sequence 1 receives its only token.

    The prefill cache has four blocks of one token, and a prompt of two tokens more.
    """
    observation = observed()
    remote = remote_of(observation.oracle)
    remote.shape = RemoteShape(1, 4, 1)
    remote.prompts = {1: written, 6: 2}
    remote.receives = {1: Receive(1, written, num_lost=lost)}
    remote.num_leaving = leaving
    shown = {"transfers": transfers, **shown}
    return replace(observation, after=replace(observation.after, **shown))


def polling(status: Any, *transfers: Transfer, **fields: Any) -> Observation:
    return receiving(*transfers, receive_statuses={1: status}, **fields)


def peeking(keys: Any, layer: int = 0) -> Observation:
    """Return an observation of these keys of the prompt of sequence 6, and of right values."""
    _, values = PAYLOAD.layer([token_of(6, 0), token_of(6, 1)], 0)
    result = keys if isinstance(keys, Exception) else (keys, values)
    return receiving(remote_reads={(6, layer): result})


def counting(
    free: Any, *transfers: Transfer, status: str = "in flight", **more: Any
) -> Observation:
    statuses = {1: status}
    return receiving(*transfers, remote_free_blocks=free, receive_statuses=statuses, **more)


def sharing(observation: Observation) -> Observation:
    return replace(observation, declared=declaring(prefixes=PrefixTraits(shares="equal prefixes")))


KEYS, _ = PAYLOAD.layer([token_of(6, 0), token_of(6, 1)], 0)
HELD = [Ledger({0: 1, 1: 1, 2: 1, 3: 1}, [], 4)]
RIGHT: Right = {
    receive_statuses: [
        observed(),
        polling("done"),
        polling("in flight", PUSH),
        polling("in flight", written=0),
        polling("failed", lost=1),
        polling("done", LATE),
    ],
    remote_prompts: [observed(), peeking(KEYS)],
    remote_blocks: [
        observed(),
        counting(1),
        counting(2, status="done"),
        counting(1, status="done"),
        counting(0, LATE, leaving=1),
        sharing(counting(3)),
    ],
    blocks_of_receives: [observed(), receiving(PUSH), receiving(LATE, ledgers=HELD)],
}
WRONG: Wrong = [
    (
        receive_statuses,
        receiving(transfers=KeyError(3)),
        "transfers_in_flight() raised KeyError: 3",
    ),
    (receive_statuses, polling(KeyError(3)), "poll_receive(1) raised KeyError: 3"),
    (
        receive_statuses,
        polling("done", PUSH),
        "poll_receive(1) returned 'done', and transfer 7 is in flight",
    ),
    (
        receive_statuses,
        polling("done", written=0),
        "returned 'done', and 1 of its 1 tokens are not written yet",
    ),
    (receive_statuses, polling("failed"), "'failed', and none of its transfers has failed"),
    (
        receive_statuses,
        polling("in flight", LATE),
        "'in flight', and all of it is written, and no transfer of it is in flight",
    ),
    (remote_prompts, peeking(KeyError(3)), "peek_remote(6, 0) raised KeyError: 3"),
    (
        remote_prompts,
        peeking(KEYS[:1]),
        "peek_remote(6, 0), K: expected shape torch.Size([2, 2, 4]), found torch.Size([1, 2, 4])",
    ),
    (remote_prompts, peeking(KEYS * 0), "K: position 0, head 0: expected"),
    (remote_blocks, counting(KeyError(3)), "remote_free_blocks() raised KeyError: 3"),
    (
        remote_blocks,
        counting(0, leaving=1),
        "has 4 blocks in use, and 3 are right: some are not freed",
    ),
    (remote_blocks, sharing(counting(0)), "has 4 blocks in use, and 3 are right: some are not"),
    (
        remote_blocks,
        counting(3, status="done"),
        "has 1 block in use, and 2 to 3 are right: some were freed too early",
    ),
    (
        blocks_of_receives,
        receiving(replace(PUSH, blocks=(3,))),
        "block 3, which transfer 7 will write to, is not in the table of sequence 1",
    ),
    (
        blocks_of_receives,
        receiving(replace(LATE, blocks=(1,))),
        "block 1, which transfer 7 will write to, is in the table of sequence 1",
    ),
    (blocks_of_receives, receiving(LATE), "block 3, which transfer 7 will write to, is free"),
]
