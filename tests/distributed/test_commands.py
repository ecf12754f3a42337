"""Commands that the leading rank sends for a forward pass, seen without other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.distributed.ranks import CopyBlocks, Forward, LeadingRank
from roseinfer.engine.runner import SequenceRunner
from tests.decode.residents import SIZE, build_runner

if TYPE_CHECKING:
    import torch

    from roseinfer.distributed.ranks import RankCommand
    from roseinfer.kv.sequence import CachedSequence


class _OnlyRank(LeadingRank):
    """A leader without followers, which records its commands."""

    def __init__(self) -> None:
        self.size = 1
        self.commands: list[RankCommand] = []

    def send_command(self, command: RankCommand) -> None:
        self.commands.append(command)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_forward_pass_and_block_copies_are_sent(device: str) -> None:
    runner = build_runner(device)
    expected, _ = runner.prefill([[7, 3, 90, 12, 5]])
    logits = runner.extend([_continued(runner.fork(expected[0]), 8)])

    ranks = _OnlyRank()
    model, kv = build_runner(device).model, build_runner(device).kv
    model.ranks = ranks
    leader = SequenceRunner(model, kv, attention="triton" if device == "cuda" else "reference")
    (sequence,), _ = leader.prefill([[7, 3, 90, 12, 5]])
    fork = leader.fork(sequence)
    shared = list(sequence.block_lists[0])
    assert leader.extend([_continued(fork, 8)]).equal(logits)

    prompt, copy, token = ranks.commands
    assert isinstance(prompt, Forward)
    assert prompt.token_ids == [7, 3, 90, 12, 5]
    assert list(prompt.plans[0].blocks) == [shared[0]] * SIZE + [shared[1]]
    assert copy == CopyBlocks(0, [shared[1]], [fork.block_lists[0][1]])
    assert isinstance(token, Forward)
    assert (token.token_ids, token.positions) == ([8], [5])
    assert list(token.plans[0].blocks) == [fork.block_lists[0][1]]


def _continued(sequence: CachedSequence, token: int) -> CachedSequence:
    sequence.token_ids.append(token)
    return sequence
