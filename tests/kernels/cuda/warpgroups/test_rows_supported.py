"""Which rows that decode their own kernel takes, and what a backend hands it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import AttentionPath
from roseinfer.attention.backend import ResidentBatch
from roseinfer.kernels.cuda import decode_attention
from roseinfer.kernels.cuda.decode_attention import RowSizes, attend_rows, can_attend_rows
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.layer_traits import LayerTraits, RotaryEmbedding
from tests.kernels.cuda.warpgroups.prompts import TOLERANCE, emulated
from tests.kernels.cuda.warpgroups.rows import Rows
from tests.kernels.cuda.warpgroups.test_prompts_supported import LAYERS
from tests.kernels.cuda.whole_step.emulated import COMPILER
from tests.kernels.triton.test_prefill_attention import Case

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

PLAIN = LayerTraits(1.0)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[RowSizes]:
    """Have the kernel compiled, as it were, for a GPU; return for what."""
    found: list[RowSizes] = []

    def load(sizes: RowSizes, device: torch.device) -> object:
        del device
        found.append(sizes)
        return object()

    monkeypatch.setattr(decode_attention.KERNEL, "load", load)
    monkeypatch.setattr(decode_attention, "num_multiprocessors", lambda _: 132)
    monkeypatch.setattr(
        decode_attention, "supports_wgmma", lambda _, dtype: dtype is torch.bfloat16
    )
    return found


def given(
    rows: int = 64,
    *,
    group: int = 4,
    kv_heads: int = 8,
    dim: int = 128,
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """Return heads that lie side by side, and caches that are a layer of many."""
    heads = torch.zeros((rows, (group + 2) * kv_heads, dim), dtype=dtype)
    caches = torch.zeros((2, 3, 2, kv_heads, block_size, dim), dtype=dtype)[:, 1]
    return [*heads.tensor_split([group * kv_heads, (group + 1) * kv_heads], 1), *caches]


def asked(tensors: list[Tensor], traits: LayerTraits = PLAIN) -> bool:
    query, key, value, k_cache, v_cache = tensors
    return can_attend_rows(query, key, value, k_cache, v_cache, traits)


@pytest.mark.parametrize(
    ("rows", "heads", "way"),
    [
        (3, {}, (4, 2)),
        (16, {}, (4, 2)),
        (32, {}, (3, 2)),
        (40, {}, (2, 2)),
        (64, {}, (1, 3)),
        (66, {}, (1, 3)),
        (67, {}, (2, 2)),
        (256, {}, (2, 2)),
        (64, {"dim": 64, "group": 1, "kv_heads": 12}, (2, 2)),
        (16, {"dim": 64, "group": 1, "kv_heads": 12}, (4, 2)),
        (8, {"dim": 64, "group": 1, "kv_heads": 12}, (4, 4)),
    ],
)
def test_programs_have_as_many_places_as_there_is_room_for_at_once(
    compiled: list[RowSizes], rows: int, heads: dict[str, Any], way: tuple[int, int]
) -> None:
    assert asked(given(rows, **heads))
    assert [(each.warps, each.stages) for each in compiled] == [way]


@pytest.mark.parametrize("what", LAYERS)
def test_layers_that_ask_for_more_go_elsewhere(compiled: list[RowSizes], what: str) -> None:
    assert not asked(given(), LAYERS[what])
    assert not compiled, "nothing is compiled in vain"


WRONG: dict[str, dict[str, Any]] = {
    "few rows": {"rows": 2},
    "small blocks": {"block_size": 4},
    "blocks that no tile divides": {"block_size": 48},
    "heads of 80": {"dim": 80},
    "float16": {"dtype": torch.float16},
    "too many query heads": {"group": 17},
}


@pytest.mark.parametrize("what", WRONG)
def test_sizes_that_it_does_not_compute_go_elsewhere(compiled: list[RowSizes], what: str) -> None:
    assert not asked(given(**WRONG[what]))
    assert not compiled


@pytest.mark.parametrize("which", range(5))
def test_tensors_that_lie_otherwise_go_elsewhere(compiled: list[RowSizes], which: int) -> None:
    tensors = given()
    assert asked(tensors)
    wide = torch.zeros((*tensors[which].shape[:-1], 256), dtype=torch.bfloat16)
    tensors[which] = wide[..., ::2]
    assert not asked(tensors)
    assert len(compiled) == 1


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled, and so none runs on a CPU")
@pytest.mark.parametrize("turn", [0, 64, 32])
def test_a_backend_hands_over_what_the_kernel_needs(tmp_path: Path, turn: int) -> None:
    """Triton's kernel takes heads that turn in part."""
    lengths = [70, 5, 130]
    case = Case(
        "cpu", [(length, 1) for length in lengths],
        head_dim=64, block_size=16, dtype=torch.bfloat16,
    )  # fmt: skip
    sizes = RowSizes(64, 2, 16, 2, 2)
    case.attention._kernels = replace(
        case.attention._kernels,
        append_and_attend_cuda=partial(attend_rows, program=emulated(sizes, tmp_path), sizes=sizes),
        can_attend_rows=lambda *_: True,
    )
    tables = torch.zeros((3, 10), dtype=torch.int64)
    for row, blocks in zip(tables, case.lists, strict=True):
        row[: len(blocks)] = torch.tensor(blocks)
    positions = torch.tensor(lengths)
    case.attention.prepare(ResidentBatch([tables], positions))
    key, value = (torch.randn(2, 3, 2, 64) / 2).bfloat16()
    if turn:
        angles = torch.rand(140, turn // 2).repeat(1, 2) * 6
        rotation = RotaryEmbedding(angles.cos().bfloat16(), angles.sin().bfloat16())
        got = case.attention.rotate_store_and_attend(0, case.query, key, value, positions, rotation)
        case.query = rotation.apply_to_queries(case.query, positions)
    else:
        got = case.attention.store_and_attend(0, case.query, key, value)
    torch.testing.assert_close(got, case.reference(), atol=TOLERANCE, rtol=1e-5)
    whole = turn != 32
    assert case.path_counts[AttentionPath.APPEND_AND_ATTEND_CUDA] == whole
    assert case.path_counts[AttentionPath.APPEND_AND_ATTEND] == (not whole)


def test_a_cpu_has_no_such_kernel() -> None:
    rows = Rows([10] * 20)
    assert not asked([*rows.heads, *rows.caches])
