"""Triton's interpreter without the work that it repeats: it takes half its time less.

For every kernel, and for every function that one calls, it looks through all that Triton's
language has for what it must replace, and replaces it again. For every value it makes a table of
all types, and builds the value's own type and shape anew. Here it remembers all of these. It uses
names that are Triton's own; where a release has others, the interpreter is left as it is.
"""

from __future__ import annotations

import importlib
import inspect
import os
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

from pytest_roseinfer.running.interpreter.shortcuts import shortcuts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_REPLACED = ("_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype")


@contextmanager
def remembering() -> Iterator[None]:
    """Have the interpreter remember, if kernels are interpreted; none may be running."""
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
