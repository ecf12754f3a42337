"""Watching every launch of a Triton kernel, interpreted or compiled.

Every interpreted launch passes one method. Compiled kernels call Triton's launch hooks;
launchers that bypass Triton's own path to be faster, as ``roseinfer``'s do, must take that path
while hooks are set, or profilers would miss them too.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


@contextmanager
def interpreted_launches(
    launched: Callable[[str], None], uncounted: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Call ``launched`` with each kernel's name, and run the interpreter inside ``uncounted``."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:  # then nothing has launched a kernel
        yield
        return
    executor: Any = interpreter.GridExecutor
    run = executor.__call__

    def watched(launch: Any, *args: Any, **kwargs: Any) -> None:
        launched(launch.fn.__name__)
        with uncounted():
            run(launch, *args, **kwargs)

    executor.__call__ = watched
    try:
        yield
    finally:
        executor.__call__ = run


@contextmanager
def compiled_launches(launched: Callable[[str], None]) -> Iterator[None]:
    """Call ``launched`` with each kernel's name."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        yield
        return
    hooks: Any = knobs.runtime.launch_enter_hook

    def hook(metadata: Any) -> None:
        launched(metadata.get()["name"])

    hooks.add(hook)
    try:
        yield
    finally:
        hooks.remove(hook)
