"""The kernel of a whole step against the step written down in torch, on an emulated machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer.kernels.cuda.whole_step import Megakernel
from tests.kernels.cuda.whole_step import reference
from tests.kernels.cuda.whole_step.emulated import COMPILER, EmulatedProgram
from tests.kernels.cuda.whole_step.small_models import small_rig, small_sizes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tests.kernels.cuda.whole_step.small_models import Rig

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="there is no g++")]
TOKEN = 5
MAX_LENGTH = 8192
_NAN = 0x7FFF


def assert_nearly(got: Tensor, want: Tensor) -> None:
    """All that two orders of adding up may change is how a few numbers are rounded."""
    assert not got.isnan().any()
    off = (got.float() - want.float()).abs()
    assert off.max() <= 0.02 * want.float().abs().max()
    assert off.mean() <= 0.01 * want.float().abs().mean()


def given(rig: Rig, token: int = TOKEN) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the kernel reads of a sequence."""
    return torch.tensor([token]), torch.tensor([rig.length]), rig.table()


def run(rig: Rig, program: EmulatedProgram) -> tuple[Tensor, Megakernel]:
    """Run the kernel on the rig's caches; return the logits."""
    step = Megakernel(rig.sizes, rig.weights, rig.caches, MAX_LENGTH, program)
    return step.logits(*given(rig)), step


def check(rig: Rig, program: EmulatedProgram) -> None:
    before = rig.copy_of_caches()
    want = reference.step(rig.sizes, rig.weights, before, TOKEN, rig.blocks, rig.length)
    after = rig.copy_of_caches()
    logits, step = run(rig, program)
    assert_nearly(logits, want)
    assert not step.timeouts.any()
    block, place = rig.blocks[rig.length // rig.sizes.block_size], rig.length % rig.sizes.block_size
    for own, wanted, others in zip(rig.caches, before, after, strict=True):
        for cache, want, old in zip(own, wanted, others, strict=True):
            assert_nearly(cache[block, :, place], want[block, :, place])
            old[block, :, place] = cache[block, :, place]
            assert torch.equal(cache.view(torch.int16), old.view(torch.int16))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> EmulatedProgram:
    return EmulatedProgram(small_sizes(16), tmp_path_factory.mktemp("step"))


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> EmulatedProgram:
    """A program whose threads soon give up waiting."""
    return EmulatedProgram(small_sizes(16), tmp_path_factory.mktemp("step"), max_polls=3000)


@pytest.mark.parametrize("length", [0, 15, 16, 65, 129, 300])
def test_contexts_of_many_lengths(program: EmulatedProgram, length: int) -> None:
    """No token at all, the edges of blocks, tiles and parts, and several parts."""
    check(small_rig(small_sizes(16), length), program)


def test_parts_of_twice_the_size(program: EmulatedProgram) -> None:
    """From 4,096 tokens on; a program has several pieces of a context then."""
    check(small_rig(small_sizes(16), 4200, loud=60), program)


@pytest.mark.parametrize("launches", [0, 21843])
def test_a_launch_takes_no_number_of_the_one_before(
    program: EmulatedProgram, launches: int
) -> None:
    """Another token is stored at the same place, thrice; stamps have all 16 bits in the end."""
    rig = small_rig(small_sizes(16), 70)
    step = Megakernel(rig.sizes, rig.weights, rig.caches, MAX_LENGTH, program)
    step._sync_counters[0] = launches
    for token in 31, 96, TOKEN:
        caches = rig.copy_of_caches()
        want = reference.step(rig.sizes, rig.weights, caches, token, rig.blocks, rig.length)
        assert_nearly(step.logits(*given(rig, token)), want)
    assert not step.timeouts.any()


@pytest.mark.parametrize("normed", [False, True])
def test_what_kin_have(tmp_path: Path, normed: bool) -> None:
    """Models with biases, factors, and layers that rotate heads in part or not at all.

    The block size differs too, and heads have norms.
    """
    sizes = small_sizes(48, rotary_dim=16, normed=normed)
    check(small_rig(sizes, 200, biased=True, times=0.5), EmulatedProgram(sizes, tmp_path))


@pytest.mark.parametrize("seed", range(6))
def test_a_launch_that_is_given_up_makes_no_number(impatient: EmulatedProgram, seed: int) -> None:
    """Others give up waiting for a program that comes late, and the next launch is right."""
    rig = small_rig(small_sizes(16), 20)
    impatient.late, impatient.seed = seed % 3, seed
    logits, step = run(rig, impatient)
    assert logits.isnan().all()
    assert step.timeouts.tolist() == [0, 1]
    impatient.late = -1
    again = step.logits(*given(rig))
    assert step.timeouts.tolist() == [0, 1]
    want = reference.step(rig.sizes, rig.weights, rig.caches, TOKEN, rig.blocks, rig.length)
    assert_nearly(again, want)


def test_how_a_tile_lies(program: EmulatedProgram) -> None:
    """Groups of 64 inputs, 8 rows each; piece i of a row lies where i XOR the row says."""
    matrix = torch.arange(21 * 320).remainder(251).view(21, 320).to(torch.bfloat16)
    for row, group in (0, 0), (5, 1), (13, 3), (16, 2), (20, 3):
        beyond = torch.nn.functional.pad(matrix, (0, 0, 0, 8))[row : row + 8]
        got = program.tile(matrix, 128, row, group).view(2, 8, 8, 8)
        for own in range(2):
            want = beyond[:, (group + own) * 64 :][:, :64].view(8, 8, 8)
            for at in range(8):
                for piece in range(8):
                    assert torch.equal(got[own, at, piece ^ at], want[at, piece])


def test_what_lies_behind_a_matrix_does_not_show(program: EmulatedProgram) -> None:
    """Tiles at the end of a matrix come with zeros, which a program must not depend on."""
    program.fill_with(_NAN)
    try:
        check(small_rig(small_sizes(16), 20), program)
    finally:
        program.fill_with(0)


def test_the_room_that_is_reckoned_with(program: EmulatedProgram) -> None:
    sizes = small_sizes(16)
    assert 0 <= sizes.shared_bytes - program.shared_bytes() < 1024
