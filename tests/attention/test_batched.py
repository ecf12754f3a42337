"""Batched attention equals the reference, for decoding sequences of any lengths and for prompts."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import AppendPolicy, KVBlockManager
from roseinfer.attention.backend import find_backend
from roseinfer.attention.batched import BatchedAttention
from roseinfer.kv.manager import StepBatch
from roseinfer.kv.storage import IndexStaging
from tests.attention.layer_traits import KINDS, traits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.layer_traits import LayerTraits

HEAD_DIM, BLOCK_SIZE, LAYERS = 16, 4, 2
# New tokens of each sequence, step by step; sequences with one new token come first.
STEPS = (
    {0: 1, 1: 1, 2: 5, 3: 40},  # one decodes from its first token on
    {0: 1, 1: 1, 2: 1, 3: 1},
    {3: 1, 0: 7, 2: 2},  # a short sequence is joined by a chunk
    {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
    {1: 1, 4: 1},
)


def backend_of(name: str, traits: LayerTraits, kv_heads: int) -> AttentionBackend:
    """Make a backend with a cache of its own, which is full of NaN."""
    policy = AppendPolicy(triton=False)
    kv = KVBlockManager(
        LAYERS,
        kv_heads,
        HEAD_DIM,
        BLOCK_SIZE,
        100,
        "cpu",
        torch.float32,
        policy,
        layers_per_group=2,
    )
    kv.keys.fill_(torch.nan)
    kv.values.fill_(torch.nan)
    return find_backend(name)([traits] * LAYERS, kv, IndexStaging(kv.device, Counter()), Counter())


class Sequences:
    """Sequences of one backend, whose steps give the same tokens the same keys and values."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.lists: dict[int, list[list[int]]] = {}
        self.lengths: Counter[int] = Counter()

    def step(self, counts: dict[int, int], inputs: Sequence[Sequence[Tensor]]) -> Tensor:
        self.lengths.update(counts)
        batch = StepBatch(
            self.backend.kv,
            [self.lists.setdefault(name, [[]]) for name in counts],
            list(counts.values()),
            [self.lengths[name] for name in counts],
            len(list(takewhile(lambda count: count == 1, counts.values()))),
        )
        self.backend.prepare(batch)
        return torch.stack(
            [self.backend.store_and_attend(at, *layer) for at, layer in enumerate(inputs)]
        )


@pytest.mark.parametrize("heads", [(3, 9), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("names", [(), ("window",), *KINDS.values()], ids=str)
def test_it_equals_the_reference(names: Sequence[str], heads: tuple[int, int]) -> None:
    """What the cache holds after the ends of sequences is NaN, and takes no part."""
    kv_heads, q_heads = heads
    traits = traits_of(names, q_heads, HEAD_DIM, "cpu", window=6)
    batched, reference = (
        Sequences(backend_of(name, traits, kv_heads)) for name in ("batched", "reference")
    )
    draw = torch.Generator().manual_seed(0)
    for counts in STEPS:
        tokens = sum(counts.values())
        inputs = [
            tuple(
                torch.randn(tokens, number, HEAD_DIM, generator=draw)
                for number in (q_heads, kv_heads, kv_heads)
            )
            for _ in range(LAYERS)
        ]
        torch.testing.assert_close(batched.step(counts, inputs), reference.step(counts, inputs))
    assert batched.backend.path_counts == {"attention_batched": LAYERS * len(STEPS)}


def test_a_long_sequence_is_not_read_with_short_ones() -> None:
    """Short ones would be padded to its length."""
    batched = Sequences(backend_of("batched", traits_of((), 2, HEAD_DIM, "cpu"), 2))
    for counts in ({0: 1, 1: 1, 2: 1, 3: 41}, {0: 1, 1: 1, 2: 1, 3: 1}):
        rows = torch.ones(sum(counts.values()), 2, HEAD_DIM)
        batched.step(counts, [(rows, rows, rows)] * LAYERS)
    assert isinstance(batched.backend, BatchedAttention)
    (reads,) = batched.backend._reads.values()
    assert [each.length for each in reads] == [2, 42]
