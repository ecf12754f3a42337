"""Products that stream, on an emulated machine, against torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer.kernels.cuda import streamed
from roseinfer.kernels.cuda.streamed import tiles_for
from tests.kernels.cuda.warpgroups.products import SHAPES, Product, emulated, kinds
from tests.kernels.cuda.warpgroups.wrong import complaint
from tests.kernels.cuda.whole_step.emulated import COMPILER, EmulatedProgram

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from roseinfer.kernels.cuda.streamed import GemmTiles

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="there is no g++")]
Programs = dict["GemmTiles", EmulatedProgram]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return {tiles: emulated(tiles, tmp_path_factory.mktemp("product")) for tiles in kinds()}


def nearly(got: Tensor, want: Tensor) -> bool:
    """Tell if two orders of adding up may have made the difference, which is rounded then."""
    off = float((got.double() - want.double()).norm() / want.double().norm())
    return off < (1e-5 if got.dtype is torch.float32 else 2e-3)


@pytest.mark.parametrize("rows", [1, 7, 16, 29, 64])
@pytest.mark.parametrize("kind", SHAPES)
def test_products_of_few_rows(programs: Programs, kind: str, rows: int) -> None:
    product = Product(SHAPES[kind], rows)
    program = programs[tiles_for(rows, product.shape.strips)]
    assert nearly(product.computed(program), product.expected())
    assert not product.spoilt()


@pytest.mark.parametrize("rows", [33, 64])
@pytest.mark.parametrize("kind", SHAPES)
def test_products_of_wide_programs(
    programs: Programs, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some last programs have a strip that is cut, or one beyond the outputs."""
    monkeypatch.setattr(streamed, "_MIN_WIDE_PROGRAMS", 1)
    product = Product(SHAPES[kind], rows)
    program = programs[tiles_for(rows, product.shape.strips, wide=True)]
    assert nearly(product.computed(program), product.expected())
    assert not product.spoilt()


WRONG = {
    "rows are fetched too soon": ("    wait_for_previous_kernel();\n", ""),
    "a tile is given back before it is read": (
        "wgmma_wait<STRIPS == 1>();",
        "if (lane == 0) mbar_arrive(&s->empty[state.stage]); wgmma_wait<STRIPS == 1>();",
    ),
    "weights are not waited for": (
        "mbar_wait(&s->weights_full[state.stage], state.parity);\n        mbar",
        "mbar",
    ),
    "outputs of the next program are written": ("if (n < p.outputs && r", "if (r"),
    "a row behind the last is written": (" && r < p.num_rows) store", ") store"),
}


@pytest.mark.parametrize("bug", WRONG)
def test_what_is_wrong_with_it_is_found(bug: str, tmp_path: Path) -> None:
    """In a process of its own, for the machine ends that when it refuses something."""
    find, replace = WRONG[bug]
    assert complaint("products", find, replace, tmp_path)


def test_nothing_is_wrong_with_it(tmp_path: Path) -> None:
    assert not complaint("products", "", "", tmp_path)
