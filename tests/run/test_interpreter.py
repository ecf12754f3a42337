"""The fast interpreter: equal results to Triton's own, with cached lookups."""

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
    """Keep Triton's own interpreter; other tests use the fast one."""


@pytest.fixture
def member_scans() -> Iterator[mock.Mock]:
    """Count the scans of Triton's language modules by the interpreter."""
    with mock.patch("inspect.getmembers", autospec=True, side_effect=getmembers) as mock_scans:
        yield mock_scans


def attend() -> torch.Tensor:
    cache = torch.arange(3 * 2 * 4 * 8.0).reshape(3, 2, 4, 8).sin()
    query = torch.arange(2 * 4 * 8.0).reshape(2, 4, 8).cos()
    tables = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([7, 3], dtype=torch.int32)
    return paged_attention_decode(query, cache, -cache, tables, lengths, LayerTraits(0.5))


def test_fast_interpreter_gives_equal_results_with_fewer_scans(member_scans: mock.Mock) -> None:
    expected = attend()
    uncached_calls = member_scans.call_count
    with fast_interpreter():
        assert torch.equal(attend(), expected)
        member_scans.reset_mock()
        assert torch.equal(attend(), expected)
        cached_calls = member_scans.call_count
    assert cached_calls == 0 < uncached_calls
    assert torch.equal(attend(), expected)
    assert member_scans.call_count >= uncached_calls


def test_language_is_patched_once_per_kernel() -> None:
    from triton.runtime import interpreter

    with mock.patch.object(
        interpreter, "_patch_lang_core", side_effect=interpreter._patch_lang_core
    ) as patches:
        attend()
        uncached_calls = patches.call_count
        patches.reset_mock()
        with fast_interpreter():
            attend()
            calls_per_launch = patches.call_count
            attend()
            assert patches.call_count == 2 * calls_per_launch < uncached_calls
    assert interpreter.tl.core.is_builtin(interpreter.tl.load)


def test_types_and_shapes_equal_those_of_triton() -> None:
    from triton import language as tl

    def build_types() -> list[object]:
        blocks = [
            tl.block_type(dtype, shape)
            for dtype in (tl.float32, tl.int64, tl.pointer_type(tl.float32))
            for shape in ([4], [4, 2], [tl.constexpr(4), 2])
        ]
        tensors = [tl.tensor(object(), each) for each in (*blocks, tl.float32)]
        return [
            *[(each.name, each.numel, list(each.shape), each.element_ty.name) for each in blocks],
            *[(each.dtype.name, each.numel.value, str(each.shape)) for each in tensors],
        ]

    expected = build_types()
    with fast_interpreter():
        assert build_types() == build_types() == expected
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])


def operands() -> list[Any]:
    """Return tensors of many types and shapes, and Python numbers."""
    from triton import language as tl
    from triton.runtime import interpreter

    def tensor_of(dtype: Any, shape: tuple[int, ...]) -> Any:
        numbers = np.arange(prod(shape)).reshape(shape or 1) % 2 + 1
        handle = interpreter.TensorHandle(numbers.astype(interpreter._get_np_dtype(dtype)), dtype)
        return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)

    types = [
        *(tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64),
        *(tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.pointer_type(tl.float32)),
    ]
    tensors = [tensor_of(dtype, shape) for dtype in types for shape in ((), (4,), (1, 4), (2, 2))]
    return [*tensors, True, 0, 1, -1, 200, 2**31, 2**40, 2**63, 0.0, 1.5, -2.0, 1e300, "text"]


def outcome(call: Callable[[], Any]) -> Any:
    """Return the types and bits of a call's result, or its error."""
    try:
        result = call()
    except Exception as error:
        return type(error), str(error)
    tensors = result if isinstance(result, tuple) else (result,)
    return [
        (str(each.type), each.handle.data.dtype, each.handle.data.shape, each.handle.data.tobytes())
        for each in tensors
    ]


@pytest.fixture
def semantic() -> Iterator[Any]:
    """Return the semantics of operations, as in a running kernel."""
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(_decode_kernel.jit.fn)
    yield interpreter.interpreter_semantic
    scope.restore()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("arithmetic", [True, False])
@pytest.mark.parametrize("division", [True, False])
def test_operand_type_checks_equal_those_of_triton(
    semantic: Any, arithmetic: bool, division: bool
) -> None:
    def match_all() -> list[Any]:
        match = semantic.binary_op_type_checking_impl
        return [
            outcome(partial(match, left, right, True, True, arithmetic, division))
            for left, right in product(operands(), repeat=2)
        ]

    expected = match_all()
    with fast_interpreter():
        result = match_all()
    assert result == expected
    assert {type(each) for each in result} == {list, tuple}


def test_casts_equal_those_of_triton(semantic: Any) -> None:
    def cast_all() -> list[Any]:
        tensors = [each for each in operands() if hasattr(each, "handle")]
        types = list({str(each.dtype): each.dtype for each in tensors}.values())
        return [
            outcome(partial(semantic.cast, left, dtype)) for left, dtype in product(tensors, types)
        ]

    expected = cast_all()
    with fast_interpreter():
        assert cast_all() == expected


@pytest.mark.parametrize("debug", [True, False])
def test_overflow_is_detected_as_by_triton(
    semantic: Any, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import language as tl

    monkeypatch.setattr(semantic.builder, "options", replace(semantic.builder.options, debug=debug))

    def add_one() -> Any:
        return outcome(lambda: semantic.add(tl.tensor(largest, tl.int32), 1, True))

    largest = semantic.builder.get_int32(2**31 - 1)
    with np.errstate(over="ignore"):
        expected = add_one()
        with fast_interpreter():
            assert add_one() == expected
    assert (expected[0] is AssertionError) == debug


def test_number_is_the_bound_of_a_loop_in_every_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    expected, patch = attend(), interpreter._patch_lang_tensor

    def patch_as_before_3_7(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: refuse_array(self.handle.data))

    def refuse_array(data: Any) -> int:
        if data.ndim:  # as NumPy 2.4 does
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
        return int(data)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_as_before_3_7)
    with pytest.raises(interpreter.InterpreterError):
        attend()
    with fast_interpreter():
        assert torch.equal(attend(), expected)


@pytest.mark.parametrize(
    "name",
    ["_patch_lang", "_patch_lang_tensor", "_patch_builtin", "_patch_attr", "_get_np_dtype"],
)
def test_unknown_triton_version_is_not_patched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
FAST_MODULE, TRITON_MODULE = "pytest_roseinfer.run.interpreter", "triton.runtime.interpreter"


@pytest.mark.parametrize("by_option", [False, True])
def test_triton_is_patched_only_on_request(by_option: bool, project: Project) -> None:
    project.write(test_caches=CACHES)
    option = ["--roseinfer-fast-interpreter"] * by_option
    result = project.pytest("-s", "-k", "histories or without", "--roseinfer-examples=2", *option)
    modules = {
        tuple(line.split()[1:]) for line in result.outlines if line.startswith("INTERPRETER")
    }
    assert modules == {
        ("Cache", FAST_MODULE if by_option else TRITON_MODULE),
        ("Fast", FAST_MODULE),
        ("none", TRITON_MODULE),
    }


def test_non_boolean_fast_interpreter_is_refused() -> None:
    adapter = type("Quick", (ListCache,), {"fast_interpreter": "very"})
    with pytest.raises(TypeError, match=r"Quick\.fast_interpreter is 'very': write True or False"):
        conformance(adapter)
