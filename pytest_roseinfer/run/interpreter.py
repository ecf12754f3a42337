"""Shortcuts through Triton's interpreter, which remember what kernels look up again and again."""

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

# Triton's interpreter without the questions whose answers are plain: half its time is left.
#
# Every sum of two integers is done again in 64 bits to see whether it overflows, and what is seen
# is dropped, since the interpreter does not debug. Two operands of one type and one shape are
# compared in all ways that types and shapes may differ. Whatever is not plain is asked of Triton as
# ever.


_OF_SEMANTIC = ("binary_op_type_checking_impl", "broadcast_impl_value", "cast", "scalar_constant")
_OF_CORE = ("_unwrap_if_constexpr", "constexpr", "tensor", "dtype", "block_type", "pointer_type")


@contextmanager
def shortcuts(interpreter: Any) -> Iterator[None]:
    """Have the interpreter take them, if it has the names that they stand in for."""
    semantic: Any = getattr(interpreter, "interpreter_semantic", None)
    core = interpreter.tl.core
    if not all(hasattr(semantic, name) for name in _OF_SEMANTIC) or not all(
        hasattr(core, name) for name in _OF_CORE
    ):
        yield
        return
    with ExitStack() as stack:
        for where, name, made in (
            (semantic, "broadcast_impl_value", _broadcasting(semantic)),
            (semantic, "binary_op_type_checking_impl", _matching(semantic, core)),
            (semantic, "cast", _casting(semantic)),
            (core, "_unwrap_if_constexpr", _unwrapping(core)),
            (core.dtype, "__eq__", _comparing(core)),
            (interpreter, "_patch_attr", _replacing(interpreter)),
        ):
            stack.enter_context(mock.patch.object(where, name, made))
        options = semantic.builder.options
        if getattr(options, "sanitize_overflow", False) and not options.debug:
            unchecked = replace(options, sanitize_overflow=False)
            stack.enter_context(mock.patch.object(semantic.builder, "options", unchecked))
        yield


@cache
def _broadcasting(semantic: Any) -> Callable[[Any, Any], Any]:
    """Leave tensors of one shape as they are; repeat a number for each place of a tensor."""
    broadcast, tensor = semantic.broadcast_impl_value, semantic.tensor
    splat = semantic.builder.create_splat

    def repeated(number: Any, block: Any) -> Any:
        of = block.with_element_ty(number.type)
        return tensor(splat(of, number.handle), of)

    def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return (repeated(lhs, right), rhs) if right.is_block() else (lhs, rhs)
        if not right.is_block():
            return lhs, repeated(rhs, left)
        return (lhs, rhs) if _sizes(left) == _sizes(right) else broadcast(lhs, rhs)

    return broadcast_impl_value


def _sizes(block: Any) -> Any:
    return getattr(block.shape, "values", block.shape)


@cache
def _matching(semantic: Any, core: Any) -> Callable[..., Any]:
    """Cast nothing where both are of one type, and a Python number to the type of its tensor."""
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

    def made_like(of: Any, beside: Any) -> Any:
        return of if type(of) is tensor else semantic.scalar_constant(of, dtype=beside.dtype)

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
                and not (div_or_mod and one.dtype.name in floats)  # halves become floats
            ):
                both = made_like(lhs, one), made_like(rhs, one)
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
    """Call what a function of Triton's language does, not what asks first where it is called."""
    semantic = interpreter.interpreter_semantic
    made: dict[Any, Any] = {}

    def stand_in(member: Any) -> Any:
        does = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return does(*args, **kwargs)

        return call

    def patch_attr(where: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        if member not in made:
            made[member] = stand_in(member)
        scope.set_attr(where, name, made[member])

    return patch_attr


_REPLACED = ("_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype")


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Replace parts of Triton's interpreter by faster ones inside; no kernel may be running.

    Nothing is replaced where kernels are compiled, or where this Triton lacks one of the names.
    """
    interpreter = _interpreter()
    if interpreter is None or not all(hasattr(interpreter, name) for name in _REPLACED):
        yield
        return
    core = interpreter.tl.core
    with (
        mock.patch.object(interpreter, "_patch_builtin", _patching(interpreter)),
        mock.patch.object(interpreter, "_patch_lang", _patching_once(interpreter)),
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
    except ImportError:  # nobody has kernels here
        return None


@cache
def _patching(interpreter: Any) -> Callable[..., None]:
    is_builtin = interpreter.tl.core.is_builtin
    found: dict[object, list[str]] = {}

    def patch_builtin(where: Any, *rest: Any) -> None:
        if where not in found:
            members = inspect.getmembers(where)
            found[where] = [name for name, member in members if is_builtin(member)]
        for name in found[where]:
            member = getattr(where, name)
            if is_builtin(member):  # else a kernel that calls this one has replaced it by now
                interpreter._patch_attr(where, name, member, *rest)

    return patch_builtin


@cache
def _remembering_types(interpreter: Any) -> Callable[[Any], Any]:
    asked, found = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(of: Any) -> Any:
        if of.name not in found:
            found[of.name] = asked(of)
        return found[of.name]

    return numpy_type


@cache
def _patching_once(interpreter: Any) -> Callable[[Any], Any]:
    """Leave out what the kernel that runs has replaced, in functions that it calls."""
    replace = interpreter._patch_lang
    replaced = set[frozenset[int]]()
    """The modules seen by what ran so far of this kernel."""
    modules_of: dict[Any, frozenset[int]] = {}

    def ended(restore: Callable[[], None]) -> Callable[[], None]:
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
            if not hasattr(scope, "restore"):  # nobody would say when it ends
                return scope
            scope.restore = ended(scope.restore)
        replaced.add(modules_of[fn])
        return scope

    return patch_lang


@cache
def _remembering_blocks(core: Any) -> Callable[[Any, Any, Any], None]:
    build, found = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        given = getattr(shape, "values", shape)
        sizes = [size if type(size) is int else getattr(size, "value", size) for size in given]
        key = (element_ty.name, *sizes)  # some types cannot be hashed
        if key not in found:
            build(self, element_ty, shape)
            found[key] = dict(vars(self))
        else:
            vars(self).update(found[key], element_ty=element_ty)

    return init


@cache
def _remembering_shapes(core: Any) -> Callable[[Any, Any, Any], None]:
    build, found = core.tensor.__init__, dict[Any, dict[str, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        own = {"handle": handle, "type": type, "dtype": type.scalar}
        key = tuple(getattr(type.shape, "values", type.shape)) if type.is_block() else ()
        if key not in found:
            build(self, handle, type)
            found[key] = {name: part for name, part in vars(self).items() if name not in own}
        else:
            vars(self).update(found[key], **own)

    return init
