"""One prompt of the engine's, stored once and continued in several ways."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer.targets.own.alone import goes_on
from roseinfer import SamplingBatch, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.mix import Sampling


def params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(**asdict(sampling))


def forked(sessions: Any, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
    """Return what each fork of the prompt's sequence generates; all go on together."""
    (first,), logits = sessions.prefill([list(prompt)])
    forks = [first, *(sessions.fork(first) for _ in samplings[1:])]
    logits = logits.expand(len(forks), -1)
    going = list(zip(forks, samplings, strict=True))
    while going:
        texts = [fork.token_ids for fork, _ in going]
        chosen = _choose(logits, [own for _, own in going], texts, len(prompt))
        for (fork, _), token in zip(going, chosen, strict=True):
            fork.token_ids.append(token)
        going = [(fork, own) for fork, own in going if goes_on(fork.token_ids, len(prompt), own)]
        if going:
            logits = sessions.extend([fork for fork, _ in going])
    found = [fork.token_ids[len(prompt) :] for fork in forks]
    for fork in forks:
        sessions.release(fork)
    return found


def _choose(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    tokens: Sequence[Sequence[int]],
    prompted: int,
) -> list[int]:
    """Choose the next token of each fork by the engine's own sampling."""
    seeds = [each.seed for each in samplings]
    tally = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    for row, own in enumerate(tokens):
        tally[row, list(own[:prompted])] = 1 << 30
        for token in own[prompted:]:
            tally[row, token] += 1
    positions = torch.tensor([len(own) for own in tokens], device=logits.device)
    batch = SamplingBatch.of([*map(params, samplings)], seeds, logits.device)
    chosen: list[int] = batch.choose(logits, positions, tally).tolist()
    return chosen
