"""Products that stream tell those who count bytes what they move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.gates.work.moved.byte_recorder import ByteRecorder
from pytest_roseinfer.gates.work.moved.operation_bytes import address
from roseinfer.kernels.warpgroups.streamed_products import KERNEL, stream
from tests.warpgroups.products import Product, Shape

if TYPE_CHECKING:
    import ctypes


class Nothing:
    """A program that computes nothing: what is told is told before."""

    def encode(self, *given: object) -> None:
        pass

    def launch(self, params: ctypes.Structure, programs: int) -> None:
        pass


def test_all_is_moved_once() -> None:
    shape = Shape(256, 72, biased=True)
    product = Product(shape, 3)
    out = product.room[:, :3]
    with ByteRecorder("cpu") as recorder:
        stream(product.x, product.weight, product.bias, out, 1, Nothing())
    told = {move.address: move.amount for move in recorder.moves if move.by == KERNEL}
    assert product.bias is not None
    assert told == {
        address(product.x): 3 * 256 * 2,
        address(product.weight): 72 * 256 * 2,
        address(product.bias): 72 * 2,
        address(out): 3 * 72 * 2,
    }
    assert not recorder.not_counted
