"""Attention of prompts by warpgroups, on an emulated machine, against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kernels.cuda.warpgroups.prompts import TOLERANCE, Attention, Prompts, emulated
from tests.kernels.cuda.warpgroups.wrong import complaint
from tests.kernels.cuda.whole_step.emulated import COMPILER

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="there is no g++")]

CASES = {
    "a prompt": Prompts([(0, 200)]),
    "one token": Prompts([(0, 1), (64, 1), (63, 1)]),
    "at the ends of tiles": Prompts([(0, 63), (0, 64), (0, 65), (1, 63), (64, 64)]),
    "behind what is stored": Prompts([(70, 130), (4100, 20), (127, 3), (5, 33)]),
    "small blocks": Prompts([(0, 150), (300, 90)], group=3, block_size=16),
    "large blocks": Prompts([(0, 150), (130, 70)], group=1, kv_heads=1, block_size=128),
    "large heads": Prompts([(0, 150), (30, 33)], dim=128, group=8, block_size=32),
    "one token a warpgroup": Prompts([(60, 9)], group=16, block_size=8),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_of_prompts(case: str, tmp_path: Path) -> None:
    prompts = CASES[case]
    program = emulated(prompts.sizes, tmp_path)
    for rotates, runs in ((False, (1, 5)), (True, (2,))):
        attention = Attention(prompts, sharp=3.0, rotates=rotates)
        want = attention.expected()
        for program.seed, programs in enumerate(runs):
            got = attention.computed(program, programs).double()
            assert float((got - want).abs().max()) < TOLERANCE


WRONG = {
    "keys are not waited for": (
        "        mbar_wait(&s->keys_full[k.stage], k.parity);\n        wgmma_fence();\n",
        "        wgmma_fence();\n",
    ),
    "keys are given back before they are read": (
        "        wgmma_wait<PENDING>();\n        pin_registers<TILE_T / 2>(scores);\n"
        "        release(s->keys_empty, &k);\n",
        "        release(s->keys_empty, &k);\n        wgmma_wait<PENDING>();\n",
    ),
    "values are given back before they are read": (
        "            wgmma_wait_all<2>();\n",
        "            sync_warp();\n",
    ),
    "some of a warp still wait when it says that they have": (
        "            sync_warp();  // all lanes have waited before one of them signals it\n",
        "",
    ),
    "what is stored behind the last token counts": (
        "if (begin + TILE_T > item.last()) zero_from",
        "if (false) zero_from",
    ),
    "a token sees itself twice": (">= position[i / 2 % 2]", "> position[i / 2 % 2]"),
    "a token does not see itself": ("merged_weight_sum[half] = 1;", "merged_weight_sum[half] = 0;"),
    "results come where others still multiply queries": (
        "    DEV void store() {\n        sync();\n",
        "    DEV void store() {\n",
    ),
    "queries are multiplied before all are there": (
        "        sync();  // all warps' queries are loaded\n",
        "",
    ),
    "keys of own tokens come where values are still read": (
        "        sync_warp();\n        stage_own(keys);\n",
        "        stage_own(keys);\n",
    ),
    "values of own tokens are read before they are there": (
        "        stage_own(values);\n        sync_warp();\n",
        "        stage_own(values);\n",
    ),
    "queries are not rotated": ("if (p.cosines) rotate_queries();", ""),
    "queries are not waited for": ("        wait_for_async_copies();\n", ""),
    "the next queries come where those of now lie": (
        "s->queries[buffer ^ 1][group]",
        "s->queries[buffer][group]",
    ),
    "halves turn the same way": ("-b[0] * s[0]", "b[0] * s[0]"),
    "tokens of a warp turn alike": (
        "item.clamp(token_of(loaded_row(i)))",
        "item.clamp(token_of(warp * 16))",
    ),
    "a part begins with what is left of the one before": (
        "        merge(part_max);\n        accumulate = false;\n",
        "        merge(part_max);\n",
    ),
    "a part is left out": (
        "            if (part_ended) end_part(part_max);\n            part_ended",
        "            part_ended",
    ),
    "what was seen of a part is not shrunk": ("sums[i] *= rescale[i / 2 % 2];", ";"),
    "what was seen of parts is not shrunk": ("merged[i] *= rescale[i / 2 % 2];", ";"),
    "some values are left out": ("        issue(TILE_STEPS - 1, TILE_STEPS);\n", ""),
    "an item is left out": ("if (i < items)", "if (i + 1 < items)"),
    "heads behind the group are stored": (" && r % TILE_G < GROUP", ""),
}


@pytest.mark.parametrize("bug", WRONG)
def test_what_is_wrong_with_it_is_found(bug: str, tmp_path: Path) -> None:
    """In a process of its own, for the machine ends that when it refuses something."""
    find, replace = WRONG[bug]
    assert complaint("prompts", find, replace, tmp_path)


def test_nothing_is_wrong_with_it(tmp_path: Path) -> None:
    assert not complaint("prompts", "", "", tmp_path)
