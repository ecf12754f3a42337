"""Triton's interpreter computes the same when it remembers, and then looks for nothing twice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import getmembers
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

from pytest_roseinfer import conformance
from pytest_roseinfer.run.interpreter import fast_interpreter
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.kernels.triton.decode_attention import _decode_kernel, paged_attention_decode
from roseinfer.layer_traits import LayerTraits
from tests.capabilities.caches.list_cache import ListCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.project import Project

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled here")


@pytest.fixture(autouse=True)
def _fast_interpreter() -> None:
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
    with fast_interpreter():
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
        with fast_interpreter():
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
    with fast_interpreter():
        assert built() == built() == expected
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])


def operands() -> list[Any]:
    """Return tensors of many types and shapes, and Python's numbers."""
    from triton import language as tl
    from triton.runtime import interpreter

    def tensor(of: Any, shape: tuple[int, ...]) -> Any:
        numbers = np.arange(prod(shape)).reshape(shape or 1) % 2 + 1
        handle = interpreter.TensorHandle(numbers.astype(interpreter._get_np_dtype(of)), of)
        return tl.tensor(handle, tl.block_type(of, list(shape)) if shape else of)

    types = [
        *(tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64),
        *(tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.pointer_type(tl.float32)),
    ]
    tensors = [tensor(of, shape) for of in types for shape in ((), (4,), (1, 4), (2, 2))]
    return [*tensors, True, 0, 1, -1, 200, 2**31, 2**40, 2**63, 0.0, 1.5, -2.0, 1e300, "text"]


def outcome(call: Callable[[], Any]) -> Any:
    """Return types and bits of what comes, or the error."""
    try:
        found = call()
    except Exception as error:
        return type(error), str(error)
    tensors = found if isinstance(found, tuple) else (found,)
    return [
        (str(each.type), each.handle.data.dtype, each.handle.data.shape, each.handle.data.tobytes())
        for each in tensors
    ]


@pytest.fixture
def semantic() -> Iterator[Any]:
    """What operations on operands mean, as in a kernel that runs."""
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(_decode_kernel.fn)
    yield interpreter.interpreter_semantic
    scope.restore()


@pytest.mark.parametrize("arithmetic", [True, False])
@pytest.mark.parametrize("division", [True, False])
def test_any_two_operands_are_matched_as_by_triton_itself(
    semantic: Any, arithmetic: bool, division: bool
) -> None:
    def matched() -> list[Any]:
        match = semantic.binary_op_type_checking_impl
        return [
            outcome(partial(match, one, other, True, True, arithmetic, division))
            for one, other in product(operands(), repeat=2)
        ]

    expected = matched()
    with fast_interpreter():
        found = matched()
    assert found == expected
    assert {type(each) for each in found} == {list, tuple}


def test_any_operand_is_cast_as_by_triton_itself(semantic: Any) -> None:
    def cast() -> list[Any]:
        tensors = [each for each in operands() if hasattr(each, "handle")]
        types = list({str(each.dtype): each.dtype for each in tensors}.values())
        return [outcome(partial(semantic.cast, one, to)) for one, to in product(tensors, types)]

    expected = cast()
    with fast_interpreter():
        assert cast() == expected


@pytest.mark.parametrize("debug", [True, False])
def test_what_overflows_is_told_where_triton_tells_it(
    semantic: Any, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import language as tl

    monkeypatch.setattr(semantic.builder, "options", replace(semantic.builder.options, debug=debug))

    def added() -> Any:
        return outcome(lambda: semantic.add(tl.tensor(largest, tl.int32), 1, True))

    largest = semantic.builder.get_int32(2**31 - 1)
    with np.errstate(over="ignore"):
        expected = added()
        with fast_interpreter():
            assert added() == expected
    assert (expected[0] is AssertionError) == debug


@pytest.mark.parametrize("name", ["_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype"])
def test_a_triton_of_other_names_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    monkeypatch.delattr(interpreter, name)
    before = dict(vars(interpreter))
    with fast_interpreter():
        assert vars(interpreter) == before


CACHES = """
    from triton.runtime import interpreter

    from pytest_roseinfer import conformance
    from tests.capabilities.caches.list_cache import ListCache

    class Cache(ListCache):
        def make(self, spec):
            super().make(spec)
            print("\\nINTERPRETER", type(self).__name__, interpreter._get_np_dtype.__module__)

    class Fast(Cache):
        fast_interpreter = True

    TestCache, TestFast = conformance(Cache), conformance(Fast)

    def test_without_an_adapter():
        print("\\nINTERPRETER none", interpreter._get_np_dtype.__module__)
"""
OURS, TRITONS = "pytest_roseinfer.run.interpreter", "triton.runtime.interpreter"


@pytest.mark.parametrize("everywhere", [False, True])
def test_nothing_of_triton_is_replaced_unless_that_is_asked_for(
    everywhere: bool, project: Project
) -> None:
    project.write(test_caches=CACHES)
    option = ["--roseinfer-fast-interpreter"] * everywhere
    result = project.pytest("-s", "-k", "histories or without", "--roseinfer-examples=2", *option)
    found = {tuple(line.split()[1:]) for line in result.outlines if line.startswith("INTERPRETER")}
    assert found == {
        ("Cache", OURS if everywhere else TRITONS),
        ("Fast", OURS),
        ("none", TRITONS),
    }


def test_what_an_adapter_says_of_it_is_true_or_false() -> None:
    adapter = type("Quick", (ListCache,), {"fast_interpreter": "very"})
    with pytest.raises(TypeError, match=r"Quick\.fast_interpreter is 'very': write True or False"):
        conformance(adapter)
