"""Triton's interpreter computes the same when it remembers, and then looks for nothing twice."""

from __future__ import annotations

from inspect import getmembers
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

from pytest_roseinfer.running.interpreter import remembering
from roseinfer.kernels.attend_decode import paged_attention_decode
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.layer_traits import LayerTraits

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled here")


@pytest.fixture(autouse=True)
def _interpreter_remembers() -> None:
    """Leave the interpreter as it is, which it is in no other test."""


@pytest.fixture
def looked_through() -> Iterator[mock.Mock]:
    """Count how often the interpreter looks through a part of Triton's language."""
    with mock.patch("inspect.getmembers", autospec=True, side_effect=getmembers) as counted:
        yield counted


def attend() -> torch.Tensor:
    cache = torch.arange(3 * 2 * 4 * 8.0).reshape(3, 2, 4, 8).sin()
    query = torch.arange(2 * 4 * 8.0).reshape(2, 4, 8).cos()
    tables = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([7, 3], dtype=torch.int32)
    return paged_attention_decode(query, cache, -cache, tables, lengths, LayerTraits(0.5))


def test_the_same_comes_out_of_fewer_looks(looked_through: mock.Mock) -> None:
    expected = attend()
    by_itself = looked_through.call_count
    with remembering():
        assert torch.equal(attend(), expected)
        looked_through.reset_mock()
        assert torch.equal(attend(), expected)
        again = looked_through.call_count
    assert again == 0 < by_itself
    assert torch.equal(attend(), expected)
    assert looked_through.call_count >= by_itself


def test_what_a_kernel_replaced_is_not_replaced_again_in_its_functions() -> None:
    from triton.runtime import interpreter

    with mock.patch.object(
        interpreter, "_patch_lang_core", side_effect=interpreter._patch_lang_core
    ) as counted:
        attend()
        by_itself = counted.call_count
        counted.reset_mock()
        with remembering():
            attend()
            once = counted.call_count
            attend()
            assert counted.call_count == 2 * once < by_itself
    assert interpreter.tl.core.is_builtin(interpreter.tl.load)


def test_types_and_shapes_are_those_of_triton_itself() -> None:
    from triton import language as tl

    def built() -> list[object]:
        blocks = [
            tl.block_type(of, shape)
            for of in (tl.float32, tl.int64, tl.pointer_type(tl.float32))
            for shape in ([4], [4, 2], [tl.constexpr(4), 2])
        ]
        tensors = [tl.tensor(object(), each) for each in (*blocks, tl.float32)]
        return [
            *[(each.name, each.numel, list(each.shape), each.element_ty.name) for each in blocks],
            *[(each.dtype.name, each.numel.value, str(each.shape)) for each in tensors],
        ]

    expected = built()
    with remembering():
        assert built() == built() == expected
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])


@pytest.mark.parametrize("name", ["_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype"])
def test_a_triton_of_other_names_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    monkeypatch.delattr(interpreter, name)
    before = dict(vars(interpreter))
    with remembering():
        assert vars(interpreter) == before
