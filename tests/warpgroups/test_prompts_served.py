"""What a forward pass hands to the kernel that attends for prompts, which runs emulated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import AttentionPath
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.kernels.warpgroups.prompt_attention import attend_prompts
from roseinfer.kernels.warpgroups.prompt_sizes import PromptSizes
from tests.attention.test_chunk_kernel import Case
from tests.persistent.emulated import COMPILER
from tests.warpgroups.prompts import TOLERANCE, emulated

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no g++"),
    pytest.mark.skipif(
        not is_interpreted(), reason="kernels are compiled, and so none runs on a CPU"
    ),
]


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
        prompts=partial(attend_prompts, program=program, programs=3),
        prompt_tile=lambda *_, **__: PromptSizes(64, group, block_size).tokens,
    )
    got = case.run()
    assert case.path_counts[AttentionPath.PROMPTS] == 1
    assert not case.path_counts[AttentionPath.CHUNK_TRITON]
    torch.testing.assert_close(got, case.reference(), atol=TOLERANCE, rtol=1e-5)


def test_a_cpu_has_no_such_kernel() -> None:
    case = Case("cpu", [(0, 130)], head_dim=64, block_size=16, dtype=torch.bfloat16)
    case.run()
    assert not case.path_counts[AttentionPath.PROMPTS]
