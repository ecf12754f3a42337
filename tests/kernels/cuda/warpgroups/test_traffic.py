"""Kernels of warpgroups tell those who count bytes what they move."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.gates.bytes_moved import ByteRecorder, address
from roseinfer.kernels.cuda import decode_attention, prefill_attention
from roseinfer.kernels.cuda.paired import KERNEL as PAIRED
from roseinfer.kernels.cuda.streamed import KERNEL, stream_gemm
from tests.kernels.cuda.warpgroups import pairs
from tests.kernels.cuda.warpgroups.products import Product, Shape
from tests.kernels.cuda.warpgroups.prompts import Attention, Prompts
from tests.kernels.cuda.warpgroups.rows import Rows

if TYPE_CHECKING:
    import ctypes


class Nothing:
    """A program that computes nothing: what is told is told before."""

    def encode(self, *given: object) -> None:
        pass

    def launch(self, params: ctypes.Structure, programs: int) -> None:
        pass


def test_a_product_moves_all_once() -> None:
    shape = Shape(256, 72, biased=True)
    product = Product(shape, 3)
    out = product.room[:, :3]
    with ByteRecorder("cpu") as recorder:
        stream_gemm(product.x, product.weight, product.bias, out, 1, Nothing())
    told = {move.address: move.amount for move in recorder.accesses if move.by == KERNEL.name}
    assert product.bias is not None
    assert told == {
        address(product.x): 3 * 256 * 2,
        address(product.weight): 72 * 256 * 2,
        address(product.bias): 72 * 2,
        address(out): 3 * 72 * 2,
    }
    assert not recorder.not_counted


def test_what_is_added_to_moves_twice() -> None:
    paired = pairs.Paired(pairs.Shape(70, 128, 192, parts=2))
    with ByteRecorder("cpu") as recorder:
        paired.computed(Nothing(), pairs=1)
    told = {move.address: move.amount for move in recorder.accesses if move.by == PAIRED.name}
    assert told == {
        address(paired.x): 70 * 128 * 2,
        address(paired.weight): 192 * 128 * 2,
        address(paired.room): 2 * 70 * 192 * 2,
    }
    assert not recorder.not_counted


def test_what_is_gated_moves_once() -> None:
    paired = pairs.Paired(pairs.Shape(70, 128, 192, gates=True))
    with ByteRecorder("cpu") as recorder:
        out = paired.computed(Nothing(), pairs=1)
    told = {move.address: move.amount for move in recorder.accesses if move.by == PAIRED.name}
    assert told == {
        address(paired.x): 70 * 128 * 2,
        address(paired.weight): 2 * 192 * 128 * 2,
        address(out): 70 * 192 * 2,
    }


def test_attention_moves_what_its_tokens_see_once() -> None:
    attention = Attention(Prompts([(10, 90), (0, 65)]))
    tokens, of_token = 100 + 65, 2 * 64 * 2
    with ByteRecorder("cpu") as recorder:
        attention.computed(Nothing(), 1)
    told: Counter[int] = Counter()
    for move in recorder.accesses:
        if move.by == prefill_attention.KERNEL.name:
            assert isinstance(move.amount, int)
            told[move.address] += move.amount
    assert told.pop(address(attention.k_cache)) == 2 * tokens * of_token  # both have one storage
    assert told.pop(address(attention.query)) == attention.query.numel() * 2
    assert told.pop(address(attention.tables)) == 4 * 8
    columns = 4 * (2 + 2) * 8  # of two tiles of 48 tokens and of two more
    assert sum(told.values()) == columns + attention.query.numel() * 2
    assert not recorder.not_counted


@pytest.mark.parametrize("rotates", [False, True])
def test_attention_of_rows_moves_what_they_see_and_store_once(rotates: bool) -> None:
    rows = Rows([10, 0, 130], rotates=rotates)
    own, of_token = rows.attention, 2 * 64 * 2
    with ByteRecorder("cpu") as recorder:
        rows.computed(rows.sizes(2, 2), Nothing())
    told: Counter[int] = Counter()
    for move in recorder.accesses:
        if move.by == decode_attention.KERNEL.name:
            assert isinstance(move.amount, int)
            told[move.address] += move.amount
    assert told.pop(address(own.k_cache)) == 2 * (11 + 1 + 131) * of_token  # both have one storage
    assert told.pop(address(own.query)) == 3 * (2 * 4 + 2 + 2) * 64 * 2  # and so have the heads
    assert told.pop(address(own.tables)) == (1 + 1 + 3) * 8
    assert told.pop(address(rows.lengths)) == 3 * 8
    if rotates:
        assert own.rotation is not None
        for angles in (own.rotation.cosines, own.rotation.sines):
            assert told.pop(address(angles)) == 3 * 64 * 2
    assert list(told.values()) == [own.query.numel() * 2]
    assert not recorder.not_counted
