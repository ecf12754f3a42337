"""Recorders of tensor operations, bytecodes and block records of a call."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from roseinfer.kernels.kernel import FixedLaunch
from roseinfer.kv import pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    import pytest


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of dispatched tensor operations and launched kernels within the context.

    Operations by which Triton's interpreter runs a kernel are not recorded.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.launches: list[dict[str, Any]] = []
        """Arguments of each launch that are not fixed, by name."""
        launch = FixedLaunch.__call__

        def recorded(fixed: FixedLaunch, grid: tuple[int, int, int], *values: Any) -> None:
            self.launches.append(dict(zip(fixed.names, values, strict=True)))
            with _disable_current_modes():
                launch(fixed, grid, *values)

        monkeypatch.setattr(FixedLaunch, "__call__", recorded)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    def beyond(self, *expected: str) -> set[str]:
        """Return the operations that are neither views nor among ``expected``."""
        return {name for name, _ in self.calls} - {"select", "slice", *expected}


def count_steps(call: Callable[[], object]) -> int:
    """Count Python bytecodes executed by ``call`` and all it calls, plus C functions entered.

    A clock would measure the same with noise. A C function counts as one step however much it
    does, so its arguments have to be watched separately.
    """
    steps = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        steps += event == "opcode"
        return trace

    def profile(_frame: FrameType, event: str, _: Any) -> None:
        nonlocal steps
        steps += event == "c_call"

    before, collects = (sys.gettrace(), sys.getprofile()), gc.isenabled()
    gc.disable()  # so that no garbage of other tests is collected during the call
    sys._getframe().f_trace_opcodes = True  # Python 3.12 needs it set before tracing starts
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        if collects:
            gc.enable()
    return steps


@contextmanager
def record_new_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Yield a list to which every ``KVBlockInfo`` built within the context is appended."""
    records: list[object] = []
    build = pool.KVBlockInfo

    def counted(*args: Any, **kwargs: Any) -> pool.KVBlockInfo:
        info = build(*args, **kwargs)
        records.append(info)
        return info

    with monkeypatch.context() as patch:
        patch.setattr(pool, "KVBlockInfo", counted)
        yield records
