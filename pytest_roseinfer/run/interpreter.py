"""Shortcuts in Triton's interpreter, which cache repeated lookups of kernels."""

from __future__ import annotations

import importlib
import inspect
import os
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Fast paths of operations on operands of one type, which halve the interpreter's time
#
# Triton repeats every sum of two integers in 64 bits to detect overflow, and drops the result,
# since the interpreter runs without debug mode. It also runs all type and shape checks for two
# operands of one type and shape. All other cases are passed to Triton's own functions.


_OF_SEMANTIC = ("binary_op_type_checking_impl", "broadcast_impl_value", "cast", "scalar_constant")
_OF_CORE = ("_unwrap_if_constexpr", "constexpr", "tensor", "dtype", "block_type", "pointer_type")


@contextmanager
def shortcuts(interpreter: Any) -> Iterator[None]:
    """Install the fast paths inside, if the interpreter has the functions that they replace."""
    semantic: Any = getattr(interpreter, "interpreter_semantic", None)
    core = interpreter.tl.core
    if not all(hasattr(semantic, name) for name in _OF_SEMANTIC) or not all(
        hasattr(core, name) for name in _OF_CORE
    ):
        yield
        return
    with ExitStack() as stack:
        for owner, name, replacement in (
            (semantic, "broadcast_impl_value", _broadcasting(semantic)),
            (semantic, "binary_op_type_checking_impl", _matching(semantic, core)),
            (semantic, "cast", _casting(semantic)),
            (core, "_unwrap_if_constexpr", _unwrapping(core)),
            (core.dtype, "__eq__", _comparing(core)),
            (interpreter, "_patch_attr", _replacing(interpreter)),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        options = semantic.builder.options
        if getattr(options, "sanitize_overflow", False) and not options.debug:
            unchecked = replace(options, sanitize_overflow=False)
            stack.enter_context(mock.patch.object(semantic.builder, "options", unchecked))
        yield


@cache
def _broadcasting(semantic: Any) -> Callable[[Any, Any], Any]:
    """Return a broadcast that keeps tensors of one shape, and splats a scalar to a tensor."""
    broadcast, tensor = semantic.broadcast_impl_value, semantic.tensor
    splat = semantic.builder.create_splat

    def splatted(scalar: Any, block: Any) -> Any:
        block_type = block.with_element_ty(scalar.type)
        return tensor(splat(block_type, scalar.handle), block_type)

    def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return (splatted(lhs, right), rhs) if right.is_block() else (lhs, rhs)
        if not right.is_block():
            return lhs, splatted(rhs, left)
        return (lhs, rhs) if _sizes(left) == _sizes(right) else broadcast(lhs, rhs)

    return broadcast_impl_value


def _sizes(block: Any) -> Any:
    return getattr(block.shape, "values", block.shape)


@cache
def _matching(semantic: Any, core: Any) -> Callable[..., Any]:
    """Return a type check that casts only Python numbers, to the type of the other operand.

    All other operands of two types are passed to Triton.
    """
    match, tensor = semantic.binary_op_type_checking_impl, core.tensor
    largest = {f"int{bits}": 2 ** (bits - 1) - 1 for bits in (8, 16, 32, 64)}
    integers = {"int1", *largest, *(f"u{name}" for name in largest)}
    floats = {"fp16", "bf16", "fp32", "fp64"}

    def is_plain(one: Any, other: Any) -> bool:
        name = one.dtype.name
        if type(other) is tensor:
            return name == other.dtype.name and (name in floats or name in integers)
        if type(other) is int:
            return 0 <= other <= largest.get(name, -1) or name in floats
        return type(other) is float and name in floats

    def promote(value: Any, other: Any) -> Any:
        is_tensor = type(value) is tensor
        return value if is_tensor else semantic.scalar_constant(value, dtype=other.dtype)

    def binary_op_type_checking_impl(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if arithmetic_check:
            one, other = (lhs, rhs) if type(lhs) is tensor else (rhs, lhs)
            if (
                type(one) is tensor
                and is_plain(one, other)
                and not (div_or_mod and one.dtype.name in floats)  # fp16 becomes fp32
            ):
                both = promote(lhs, one), promote(rhs, one)
                return semantic.broadcast_impl_value(*both)
        return match(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return binary_op_type_checking_impl


@cache
def _casting(semantic: Any) -> Callable[..., Any]:
    convert = semantic.cast

    def cast(input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:  # noqa: A002
        if input.dtype is dst_ty.scalar:
            return input
        return convert(input, dst_ty, fp_downcast_rounding)

    return cast


@cache
def _unwrapping(core: Any) -> Callable[[Any], Any]:
    unwrap, constant = core._unwrap_if_constexpr, core.constexpr
    as_they_are = {int, float, bool, core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrap_if_constexpr(o: Any) -> Any:
        kind = type(o)
        if kind in as_they_are:
            return o
        return o.value if kind is constant else unwrap(o)

    return unwrap_if_constexpr


@cache
def _comparing(core: Any) -> Callable[[Any, Any], bool]:
    compare = core.dtype.__eq__

    def equal(self: Any, other: Any) -> bool:
        return self is other or bool(compare(self, other))

    return equal


@cache
def _replacing(interpreter: Any) -> Callable[..., None]:
    """Return a patcher that calls the wrapped function of a builtin, without its caller check."""
    semantic = interpreter.interpreter_semantic
    replacements: dict[Any, Any] = {}

    def replacement(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def patch_attr(owner: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        if member not in replacements:
            replacements[member] = replacement(member)
        scope.set_attr(owner, name, replacements[member])

    return patch_attr


_REPLACED = (
    "_patch_lang",
    "_patch_lang_tensor",
    "_patch_builtin",
    "_patch_attr",
    "_get_np_dtype",
)


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Replace parts of Triton's interpreter by faster ones inside; no kernel may be running.

    Nothing is replaced if kernels are compiled, or if this Triton lacks one of the names.
    """
    interpreter = _interpreter()
    if interpreter is None or not all(hasattr(interpreter, name) for name in _REPLACED):
        yield
        return
    core = interpreter.tl.core
    with (
        mock.patch.object(interpreter, "_patch_builtin", _patching(interpreter)),
        mock.patch.object(interpreter, "_patch_lang", _patching_once(interpreter)),
        mock.patch.object(interpreter, "_patch_lang_tensor", _indexing(interpreter)),
        mock.patch.object(interpreter, "_get_np_dtype", _remembering_types(interpreter)),
        mock.patch.object(core.block_type, "__init__", _remembering_blocks(core)),
        mock.patch.object(core.tensor, "__init__", _remembering_shapes(core)),
        shortcuts(interpreter),
    ):
        yield


def _interpreter() -> Any:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return None
    try:
        return importlib.import_module("triton.runtime.interpreter")
    except ImportError:  # without Triton there are no kernels
        return None


def _indexing(interpreter: Any) -> Callable[[Any, Any], None]:
    """Return a patcher of tensors that lets a number of any Triton be the bound of a loop.

    Triton before 3.7 passes an array of one element to ``int``, which NumPy 2.4 refuses.
    """
    patch = interpreter._patch_lang_tensor

    def index(self: Any) -> int:
        return int(self.handle.data.item())

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", index)

    return patch_lang_tensor


@cache
def _patching(interpreter: Any) -> Callable[..., None]:
    """Return a patcher that looks up the builtins of a module once."""
    is_builtin = interpreter.tl.core.is_builtin
    builtins: dict[object, list[str]] = {}

    def patch_builtin(owner: Any, *rest: Any) -> None:
        if owner not in builtins:
            members = inspect.getmembers(owner)
            builtins[owner] = [name for name, member in members if is_builtin(member)]
        for name in builtins[owner]:
            member = getattr(owner, name)
            if is_builtin(member):  # otherwise a calling kernel has replaced it already
                interpreter._patch_attr(owner, name, member, *rest)

    return patch_builtin


@cache
def _remembering_types(interpreter: Any) -> Callable[[Any], Any]:
    """Return a cached lookup of NumPy dtypes."""
    look_up, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = look_up(dtype)
        return dtypes[dtype.name]

    return numpy_type


@cache
def _patching_once(interpreter: Any) -> Callable[[Any], Any]:
    """Return a patcher that skips modules which the running kernel has patched already."""
    replace = interpreter._patch_lang
    replaced = set[frozenset[int]]()
    """Sets of modules that the running kernel and its callees have patched."""
    modules_of: dict[Any, frozenset[int]] = {}

    def restore_and_clear(restore: Callable[[], None]) -> Callable[[], None]:
        def end() -> None:
            replaced.clear()
            restore()

        return end

    def patch_lang(fn: Any) -> Any:
        if fn not in modules_of:
            modules_of[fn] = frozenset(map(id, filter(inspect.ismodule, fn.__globals__.values())))
        if modules_of[fn] in replaced:
            return None
        scope = replace(fn)
        if not replaced:  # the kernel begins
            if not hasattr(scope, "restore"):  # the end of the kernel would go unnoticed
                return scope
            scope.restore = restore_and_clear(scope.restore)
        replaced.add(modules_of[fn])
        return scope

    return patch_lang


@cache
def _remembering_blocks(core: Any) -> Callable[[Any, Any, Any], None]:
    """Return an initialiser of block types that copies the fields of an equal one."""
    build, cached = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        values = getattr(shape, "values", shape)
        sizes = [size if type(size) is int else getattr(size, "value", size) for size in values]
        key = (element_ty.name, *sizes)  # some types cannot be hashed
        if key not in cached:
            build(self, element_ty, shape)
            cached[key] = dict(vars(self))
        else:
            vars(self).update(cached[key], element_ty=element_ty)

    return init


@cache
def _remembering_shapes(core: Any) -> Callable[[Any, Any, Any], None]:
    """Return an initialiser of tensors that copies the fields that depend only on the shape."""
    build, cached = core.tensor.__init__, dict[Any, dict[str, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        fields = {"handle": handle, "type": type, "dtype": type.scalar}
        key = tuple(getattr(type.shape, "values", type.shape)) if type.is_block() else ()
        if key not in cached:
            build(self, handle, type)
            cached[key] = {name: part for name, part in vars(self).items() if name not in fields}
        else:
            vars(self).update(cached[key], **fields)

    return init
