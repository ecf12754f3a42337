"""Watching every launch of a Triton kernel, interpreted or compiled.

Every interpreted launch passes one method. Compiled kernels call Triton's launch hooks;
launchers that bypass Triton's own path to be faster, as ``roseinfer``'s do, must take that path
while hooks are set, or profilers would miss them too.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager


DECLARATION = "moves"
"""Where a launch says what it moves: an attribute of a Triton kernel's Python function, or an entry
of what a launcher of other kernels tells Triton's hooks."""


class Launch(NamedTuple):
    """A kernel that is about to run."""

    kernel: str
    function: Callable[..., object] | None
    """The kernel's Python function; None where only a compiled kernel is known."""
    arguments: Mapping[str, Any]
    """By parameter; nothing without a function."""
    moves: Callable[[], Iterable[tuple[Any, int | Callable[[], int]]]] | None = None
    """What a kernel that is not Triton's tells Triton's hooks that it moves, by tensor."""


@contextmanager
def interpreted_launches(
    launched: Callable[[Launch], None], uncounted: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Call ``launched`` with each launch, and run the interpreter inside ``uncounted``."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:  # then nothing has launched a kernel
        yield
        return
    kernels: Any = interpreter.InterpretedFunction
    run = kernels.run

    def watched(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not warmup:
            by_name = dict(zip(kernel.arg_names, args, strict=False))
            launched(Launch(kernel.__name__, kernel.fn, {**by_name, **kwargs}))
        with uncounted():
            run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    kernels.run = watched
    try:
        yield
    finally:
        kernels.run = run


@contextmanager
def compiled_launches(launched: Callable[[Launch], None]) -> Iterator[None]:
    """Call ``launched`` with each launch."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        yield
        return
    kernels: Any = sys.modules["triton.compiler.compiler"].CompiledKernel
    describe = kernels.launch_metadata
    described: list[tuple[Any, tuple[Any, ...]]] = []
    """The launch that the hook is about to hear of, where it is one by Triton's own path."""

    def remember(kernel: Any, grid: Any, stream: Any, *args: Any) -> Any:
        described[:] = [(getattr(kernel.src, "fn", None), args)]
        return describe(kernel, grid, stream, *args)

    hooks: Any = knobs.runtime.launch_enter_hook

    def hook(metadata: Any) -> None:
        told = metadata.get()
        name = told["name"]
        kernel, args = described.pop() if described else (None, ())
        if kernel is None:
            launched(Launch(name, None, {}, told.get(DECLARATION)))
        else:
            by_name = dict(zip(kernel.arg_names, args, strict=False))
            launched(Launch(name, kernel.fn, by_name))

    kernels.launch_metadata = remember
    hooks.add(hook)
    try:
        yield
    finally:
        hooks.remove(hook)
        kernels.launch_metadata = describe
