"""Products of many rows by pairs of programs, on an emulated machine, against torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kernels.cuda.warpgroups.pairs import SHAPES, SMALL, TOLERANCE, Paired, emulated, off
from tests.kernels.cuda.warpgroups.wrong import complaint
from tests.kernels.cuda.whole_step.emulated import COMPILER, EMULATION, EmulatedProgram

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="there is no g++")]
Programs = dict[bool, EmulatedProgram]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    made = tmp_path_factory.mktemp
    return {gates: emulated(sizes, made("paired")) for gates, sizes in SMALL.items()}


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("kind", SHAPES)
def test_products_of_many_rows(programs: Programs, kind: str, pairs: int) -> None:
    shape = SHAPES[kind]
    paired, program = Paired(shape), programs[shape.gates]
    program.seed = pairs
    assert off(paired.computed(program, SMALL[shape.gates], pairs), paired.expected()) < TOLERANCE
    assert not paired.spoilt()


_SOURCE = SMALL[False].source(EMULATION)
_BEGIN = _SOURCE[
    _SOURCE.index("    if (THREAD == 0) {") : _SOURCE.index("    if (THREAD < CONSUMERS)")
]
WRONG = {
    "a tile is given back to one program alone": (
        "if (lane < 2) mbar_arrive",
        "if (lane == BLOCK % 2) mbar_arrive",
    ),
    "a tile is given back before it is read": (
        "            release(previous);\n            previous",
        "            release(stage);\n            previous",
    ),
    "the other half of the weights": (
        "item.output + program * HALF",
        "item.output + (1 - program) * HALF",
    ),
    "parts are not begun afresh": ("multiply_tile(true)", "multiply_tile(false)"),
    "a part is left out": (
        "for (int part = 0; part < p.parts",
        "for (int part = 1; part < p.parts",
    ),
    "the factor is left out": ("fmadd(sum, p.scale,", "fmadd(sum, 1.0f,"),
    "pieces lie in another order": ("((n % 8) ^ (row % 8))", "((n % 8) ^ (row % 4))"),
    "what is added to is not waited for": (
        "        mbar_wait(&s->out_ready[group], out_parity);\n",
        "",
    ),
    "a tile is taken before all of it is there": (
        "mbar_init(&s->out_written[i], 4)",
        "mbar_init(&s->out_written[i], 3)",
    ),
    "the next tile comes while one is taken": ("        wait_for_stores_read();\n", ""),
    "rows are fetched too soon": (
        "    prefetch_map(&p.weights);\n    wait_for_previous_kernel();\n",
        "    prefetch_map(&p.weights);\n",
    ),
    "what is added to is fetched too soon": (
        "    prefetch_map(&p.out);\n    wait_for_previous_kernel();\n",
        "    prefetch_map(&p.out);\n",
    ),
    "programs begin before the other one is there": (
        _BEGIN,
        "    if (BLOCK % 2) for (int i = 0; i < 400; i++) yield();\n"
        + _BEGIN.replace("sync_pair()", "barrier_sync(0, THREADS)"),
    ),
    "a program goes before the other one is done": ("    }\n    sync_pair();\n}", "    }\n}"),
    "items are taken twice": ("i += p.pairs", "i += p.pairs - (i == 0 && p.pairs > 1)"),
}


@pytest.mark.parametrize("bug", WRONG)
def test_what_is_wrong_with_it_is_found(bug: str, tmp_path: Path) -> None:
    """In a process of its own, for the machine ends that when it refuses something."""
    find, replace = WRONG[bug]
    assert complaint("pairs", find, replace, tmp_path)


def test_nothing_is_wrong_with_it(tmp_path: Path) -> None:
    assert not complaint("pairs", "", "", tmp_path)
