"""What the kernel of a whole step tells those who listen to launches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_roseinfer.gates.bytes_moved import ByteRecorder, address
from pytest_roseinfer.gates.step_work import TensorWork
from roseinfer.bench.trace import record_declared_traffic
from roseinfer.kernels.cuda.whole_step import KERNEL, Megakernel
from tests.kernels.cuda.whole_step.small_models import small_rig, small_sizes

if TYPE_CHECKING:
    import ctypes

    from torch import Tensor

LENGTH, BLOCK = 300, 16
"""Three parts of a context, and 19 blocks."""


class Nothing:
    """A program that computes nothing: what is told is told before."""

    def encode(self, *given: object) -> None:
        pass

    def launch(self, params: ctypes.Structure, programs: int) -> None:
        pass


class Launch:
    def __init__(self, length: int = LENGTH) -> None:
        sizes = small_sizes(BLOCK, rotary_dim=16, normed=True)
        self.rig = small_rig(sizes, length, biased=True)
        self.step = Megakernel(sizes, self.rig.weights, self.rig.caches, 4096, Nothing())
        self.given = torch.tensor([7]), torch.tensor([length]), self.rig.table()

    def run(self) -> Tensor:
        return self.step.logits(*self.given)


def bytes_of(recorder: ByteRecorder) -> Counter[int]:
    """Return by tensor what the kernel moves."""
    found: Counter[int] = Counter()
    for move in recorder.accesses:
        if move.by == KERNEL.name:
            assert isinstance(move.amount, int)
            found[move.address] += move.amount
    return found


def test_weights_and_context_are_moved_once() -> None:
    launch = Launch()
    with ByteRecorder("cpu") as recorder:
        logits = launch.run()
    found = bytes_of(recorder)
    weights = launch.rig.weights
    wanted = {address(weights.head): 97 * 256 * 2, address(weights.norm): 512}
    for layer in weights.layers:
        assert layer.rotation is not None
        assert layer.qkv_bias is not None
        both = layer.norm, layer.mlp_norm
        whole = *both, layer.qkv, layer.qkv_bias, layer.out, layer.gate_up_weight, layer.down
        wanted |= {address(each): each.nbytes for each in whole}
        for row in layer.rotation.cosines, layer.rotation.sines:
            wanted[address(row)] = 16 * 2
        for gain in layer.rotation.query_norm_weight, layer.rotation.key_norm_weight:
            assert gain is not None
            wanted[address(gain)] = 32 * 2
    for cache in (each for pair in launch.rig.caches for each in pair):
        wanted[address(cache)] = (LENGTH + 1) * 2 * 32 * 2
    token, length, table = launch.given
    wanted |= {address(token): 8, address(length): 8, address(table): 19 * 8}
    wanted[address(logits)] = 97 * 2
    assert {at: found[at] for at in wanted} == wanted
    handed = 2 * 256 + 10 * 32 + 6 * 32 + 1024
    assert sum(found.values()) - sum(wanted.values()) == 2 * (handed * 4 + 4 * 6 * (32 + 2) * 8)
    assert not recorder.not_counted


def test_a_context_counts_when_the_kernel_runs() -> None:
    """As where a graph was captured before the sequence grew."""
    launch = Launch()
    with ByteRecorder("cpu", captures=True) as recorder:
        launch.run()
    launch.given[1].fill_(0)
    amounts = [move.resolve_amount() for move in recorder.accesses]
    assert sum(move.address == address(launch.given[2]) for move in amounts) == 1
    cache = address(launch.rig.caches[0][0])
    assert [move.amount for move in amounts if move.address == cache] == [2 * 32 * 2]


def test_words_of_another_matrix_are_one_row() -> None:
    launch = Launch()
    words = launch.rig.weights.words.clone()
    object.__setattr__(launch.rig.weights, "words", words)
    with ByteRecorder("cpu") as recorder:
        launch.run()
    assert bytes_of(recorder)[address(words)] == 256 * 2


@pytest.mark.parametrize("length", [0, LENGTH])
def test_a_trace_and_the_gate_say_the_same(length: int) -> None:
    launch = Launch(length)
    with ByteRecorder("cpu") as recorder:
        launch.run()
    with record_declared_traffic() as found:
        launch.run()
    assert found == {KERNEL.name: bytes_of(recorder).total()}


def test_the_gate_of_calls_counts_a_launch() -> None:
    work = TensorWork("cpu")
    work.count(Launch().run)
    assert work.counts["triton_launches"][KERNEL.name] == 1
