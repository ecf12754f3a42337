"""Attention of rows that decode, on an emulated machine, against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.kernels.cuda.decode_attention import RowSizes
from tests.kernels.cuda.warpgroups.prompts import TOLERANCE, emulated
from tests.kernels.cuda.warpgroups.rows import Rows
from tests.kernels.cuda.warpgroups.wrong import complaint
from tests.kernels.cuda.whole_step.emulated import COMPILER

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="there is no g++")]

LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 300]
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "at the ends of tiles and parts": (LENGTHS, {}),
    "small blocks": ([300, 5, 16, 150], {"group": 3, "block_size": 16}),
    "large blocks": ([150, 70, 4300], {"group": 1, "kv_heads": 1, "block_size": 128}),
    "large heads": ([200, 30, 64], {"dim": 128, "group": 8, "block_size": 32}),
    "more query heads than a product has columns": ([90, 300], {"group": 11}),
    "as many as two have": ([90, 0, 8], {"dim": 128, "group": 16, "block_size": 8}),
    "seven heads": ([450, 129, 10], {"dim": 128, "group": 7}),
}
WAYS = [(4, 4), (3, 2), (4, 2), (1, 3), (2, 2)]
"""Warps, and places of each."""
TIGHT = [(64, 6, (4, 2)), (64, 8, (3, 2)), (64, 9, (1, 3)), (64, 15, (4, 2)), (128, 7, (2, 2))]


@pytest.mark.parametrize("case", CASES)
def test_attention_of_rows(case: str, tmp_path: Path) -> None:
    lengths, heads = CASES[case]
    way = WAYS[list(CASES).index(case) % len(WAYS)]
    sizes = Rows([0], **heads).sizes(*way)
    program = emulated(sizes, tmp_path)
    assert program.shared_bytes() <= sizes.shared_bytes
    for program.seed, rotates in enumerate((False, True)):
        assert Rows(lengths, rotates=rotates, **heads).off(sizes, program) < TOLERANCE


@pytest.mark.parametrize(("dim", "group", "way"), TIGHT)
def test_a_program_is_given_as_much_memory_as_it_takes(
    dim: int, group: int, way: tuple[int, int], tmp_path: Path
) -> None:
    """Sizes that fill their last 1,024 bytes: the compiler refuses a kernel that is given less."""
    sizes = RowSizes(dim, group, 64, *way)
    assert emulated(sizes, tmp_path).shared_bytes() <= sizes.shared_bytes


FIRST = "if (begin) sync();  // all earlier parts have been merged\n"
SEEN = "if (begin + warp < parts) compute_part();\n"
TOGETHER = "sync();\n"
LATE = "for (int i = 0; warp == 0 && i < 3000; i++) yield();\n"
"""A warp falls far behind the others."""
WRONG = {
    "tiles are not waited for": (
        "        mbar_wait(&s->full[warp][computing.state.stage], computing.state.parity);\n",
        "",
    ),
    "what comes next is asked for before keys are read": (
        "        multiply_keys(wait_for_tile());\n        release_tile();\n",
        "        auto* keys = wait_for_tile();\n        release_tile();\n"
        "        multiply_keys(keys);\n",
    ),
    "what is stored behind the last token counts": (
        "if (begin + TILE_T > position) zero_from",
        "if (false) zero_from",
    ),
    "a token sees its own place twice": ("i / 2 % 2 * 8 >= position)", "i / 2 % 2 * 8 > position)"),
    "a token does not see itself": ("merged_weight_sum[i] = 1;", "merged_weight_sum[i] = 0;"),
    "queries are read before they are there": (
        "        load_new_heads(cosines, sines);\n        sync();\n",
        "        load_new_heads(cosines, sines);\n",
    ),
    "parts are added up before they have been seen": (
        "            sync();\n            int computed",
        "            int computed",
    ),
    "parts are seen before those in front are added up": (
        f"            {FIRST}            {SEEN}            {TOGETHER}",
        f"            {SEEN}            {TOGETHER}            {LATE}",
    ),
    "the key is not rotated": ("p.cosines && member <= GROUP", "p.cosines && member < GROUP"),
    "the value is rotated": ("p.cosines && member <= GROUP", "p.cosines"),
    "key and value are exchanged": (
        "(member == GROUP ? p.k_cache : p.v_cache)",
        "(member == GROUP ? p.v_cache : p.k_cache)",
    ),
    "the new token is stored elsewhere": (
        "cache_row(position) * DIM",
        "cache_row(position / 2) * DIM",
    ),
    "weights lie the other way": ("transpose_matrix(pack_bf16(", "(pack_bf16("),
    "the last part is left out": (
        "if (begin + warp < parts) compute",
        "if (begin + warp + 1 < parts) compute",
    ),
    "what was seen of parts is not shrunk": ("merged[0] * rescale", "merged[0]"),
    "what was seen of a part is not shrunk": ("sums[tile][n][half] *= rescale;", ";"),
    "weights' sums are not shrunk": ("weight_sum[tile][half] *= rescale;", ""),
    "some scores are not looked at for the highest": ("mask < 32", "mask < 16"),
    "heads behind the group are stored": (
        "                if (member >= GROUP) break;\n                if (row == 0) result",
        "                if (row == 0) result",
    ),
    "a warp goes on with the next part and not with its own": (
        "begin_part(part + WARPS)",
        "begin_part(part + 1)",
    ),
}


@pytest.mark.parametrize("bug", WRONG)
def test_what_is_wrong_with_it_is_found(bug: str, tmp_path: Path) -> None:
    """In a process of its own, for the machine ends that when it refuses something."""
    find, replace = WRONG[bug]
    assert complaint("rows", find, replace, tmp_path)


@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_wrong_with_it(late: bool, tmp_path: Path) -> None:
    find = f"            {SEEN}            {TOGETHER}" if late else ""
    assert not complaint("rows", find, find + LATE if late else "", tmp_path)
