"""What a forward pass hands to the kernel that attends for prompts, which runs emulated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import AttentionPath
from roseinfer.attention import triton
from roseinfer.kernels.cuda.prefill_attention import PromptSizes, attend_prompts
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.kv.manager import StepBatch
from roseinfer.layer_traits import RotaryEmbedding
from tests.kernels.cuda.warpgroups.prompts import TOLERANCE, emulated
from tests.kernels.cuda.whole_step.emulated import COMPILER
from tests.kernels.triton.test_prefill_attention import Case

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no g++"),
    pytest.mark.skipif(
        not is_interpreted(), reason="kernels are compiled, and so none runs on a CPU"
    ),
]


@pytest.mark.sampled_cases
@pytest.mark.parametrize(("q_heads", "block_size"), [(4, 16), (10, 64)])
def test_a_backend_hands_over_what_the_kernel_needs(
    tmp_path: Path, q_heads: int, block_size: int
) -> None:
    """Single tokens stand in front, and the others' rows are counted from behind them."""
    case = Case(
        "cpu", [(3, 1), (8, 1), (70, 40), (0, 130), (5, 3)],
        q_heads=q_heads, head_dim=64, block_size=block_size, dtype=torch.bfloat16,
    )  # fmt: skip
    group = q_heads // 2
    program = emulated(PromptSizes(64, group, block_size), tmp_path)
    case.attention._kernels = replace(
        case.attention._kernels,
        prefill_cuda=partial(attend_prompts, program=program, programs=3),
        prefill_tile_tokens=lambda *_, **__: PromptSizes(64, group, block_size).tokens,
    )
    got = case.run()
    assert case.path_counts[AttentionPath.PREFILL_CUDA] == 1
    assert not case.path_counts[AttentionPath.CHUNK_TRITON]
    torch.testing.assert_close(got, case.reference(), atol=TOLERANCE, rtol=1e-5)


class Stored(StepBatch):
    """Stores new tokens of a case where it has others by now."""

    def __init__(self, case: Case, positions: torch.Tensor) -> None:
        batch = case.batch
        lists, counts, lengths = batch.block_lists, batch.counts, batch.lengths
        super().__init__(batch.kv, lists, counts, lengths, batch.num_decodes)
        size, caches = case.kv.block_size, case.kv.caches(0)
        owners = [own for own, new in zip(case.lists, case.counts, strict=True) for _ in range(new)]
        blocks = [own[at // size] for own, at in zip(owners, positions.tolist(), strict=True)]
        self.where = torch.tensor(blocks), slice(None), positions % size
        self.caches = caches

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        assert layer == 0
        for cache, numbers in zip(self.caches, (key, value), strict=True):
            cache[self.where] = numbers


@pytest.mark.sampled_cases
@pytest.mark.parametrize("whole", [True, False])
def test_who_rotates_queries(tmp_path: Path, whole: bool) -> None:
    """The kernel does, where heads turn as a whole, and all others go through them before."""
    case = Case(
        "cpu", [(3, 1), (8, 1), (70, 40), (0, 130), (5, 3)],
        q_heads=4, head_dim=64, block_size=16, dtype=torch.bfloat16,
    )  # fmt: skip
    sizes = PromptSizes(64, 2, 16)
    rotated: list[int] = []
    kernels = case.attention._kernels

    def rotate(query: torch.Tensor | None, *given: Any) -> None:
        rotated.append(0 if query is None else len(query))
        kernels.rotate(query, *given)

    case.attention._kernels = replace(
        kernels,
        prefill_cuda=partial(attend_prompts, program=emulated(sizes, tmp_path), programs=3),
        prefill_tile_tokens=lambda *_, **__: sizes.tokens,
        rotate=rotate,
    )
    angles = torch.rand(130, 32 if whole else 16).repeat(1, 2) * 6
    rotation = RotaryEmbedding(angles.cos().bfloat16(), angles.sin().bfloat16())
    ends = zip(case.batch.lengths, case.counts, strict=True)
    positions = torch.cat([torch.arange(end - count, end) for end, count in ends])
    key, value = (torch.randn(2, len(positions), 2, 64) / 2).bfloat16()
    case.attention.prepare(Stored(case, positions))
    case.query = case.query / 2
    query = case.query.clone()
    got = case.attention.rotate_store_and_attend(0, query, key.clone(), value, positions, rotation)

    Stored(case, positions).write(0, rotation.apply_to_keys(key, positions), value)
    case.query = rotation.apply_to_queries(case.query, positions)
    torch.testing.assert_close(got, case.reference(), atol=TOLERANCE, rtol=1e-5)
    assert rotated == ([2, 0] if whole else [len(positions)])
    assert case.path_counts[AttentionPath.PREFILL_CUDA] == 1


@pytest.mark.parametrize(("most", "in_order"), [(1000, True), (10, False)])
def test_what_takes_longest_begins_first(
    most: int, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of all sequences stand in one order, or where they are many, sequence by sequence."""
    monkeypatch.setattr(triton, "_MAX_SORTED_TILES", most)
    case = Case(
        "cpu", [(3, 1), (70, 40), (0, 130), (5, 3)],
        q_heads=4, head_dim=64, block_size=16, dtype=torch.bfloat16,
    )  # fmt: skip
    handed: list[tuple[torch.Tensor, ...]] = []

    def attend(query: torch.Tensor, *given: Any) -> torch.Tensor:
        handed.append(given[3])
        return torch.zeros_like(query)

    case.attention._kernels = replace(
        case.attention._kernels, prefill_cuda=attend, prefill_tile_tokens=lambda *_, **__: 32
    )
    case.run()
    sequences, rows, counts, positions = (column.tolist() for column in handed[0])
    seen = [count + position for count, position in zip(counts, positions, strict=True)]
    assert (seen == sorted(seen, reverse=True)) is in_order
    assert (sequences == [1, 1, 2, 2, 2, 2, 2, 3]) is not in_order
    begins = dict(zip((1, 2, 3), (0, 40, 170), strict=True))
    behind = {1: 70, 2: 0, 3: 5}
    for at, row, position in zip(sequences, rows, positions, strict=True):
        assert row - begins[at] == position - behind[at]
    assert sorted(counts) == [2, 3, 8, 32, 32, 32, 32, 32]


def test_a_cpu_has_no_such_kernel() -> None:
    case = Case("cpu", [(0, 130)], head_dim=64, block_size=16, dtype=torch.bfloat16)
    case.run()
    assert not case.path_counts[AttentionPath.PREFILL_CUDA]
