"""Counting the calls that the code under test makes, by function.

A call counts if the caller or the function called is its own. What libraries do among
themselves is left out: it changes with every release of theirs. What they make the device do
is counted as torch operations, whoever asked for them.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer.gates.work.triton_launches import interpreted_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from pytest_roseinfer.gates.work.own_code import OwnCode


def count_python_calls(step: Callable[[], object], own: OwnCode) -> defaultdict[str, Counter[str]]:
    """Run ``step``; how often each function was entered, those written in C too.

    Beside these come the calls, by whomever, that wait for the device or replay a graph. Tracers
    of others, coverage's say, are not seen: Python calls them with profiling off.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    calls = counts["python_calls"]
    by_code = _torch_functions()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if _concerns(frame, own):
                calls[_python_name(frame)] += 1
            if known := by_code.get(frame.f_code):
                group, name = known
                counts[group][name] += 1
        elif event == "c_call" and own.is_own(_module(frame)):
            calls[_c_name(arg)] += 1

    @contextmanager
    def apart() -> Iterator[None]:
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(profile)

    before = sys.getprofile()
    with interpreted_launches(_counted_elsewhere, apart):
        sys.setprofile(profile)
        try:
            step()
        finally:
            sys.setprofile(before)
    return counts


def _torch_functions() -> dict[CodeType, tuple[str, str]]:
    """Functions that wait for a device or hand it a graph: no operation tells of them.

    They are known by their code, since callers may have taken hold of them long before; for
    each comes the group it counts in and its name there.
    """
    waiting = (torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator, torch.cpu)
    found = {
        owner.synchronize.__code__: ("synchronisations", f"{owner.__name__}.synchronize")
        for owner in waiting
    }
    return found | {torch.cuda.CUDAGraph.replay.__code__: ("graph_replays", "replays")}


def _counted_elsewhere(_kernel: str) -> None:
    """Launches are work of the device."""


def _concerns(frame: FrameType, own: OwnCode) -> bool:
    module = _module(frame)
    if own.is_own(module):
        return True
    caller = frame.f_back
    return caller is not None and own.is_own(_module(caller)) and not own.is_tool(module)


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _python_name(frame: FrameType) -> str:
    code = frame.f_code
    name = code.co_qualname
    if code.co_filename == "<string>" and code.co_argcount:
        name = f"{_owner(frame, code)}.{code.co_name}"
    return f"{_module(frame)}.{name}"


def _owner(frame: FrameType, code: CodeType) -> str:
    """The class whose method somebody wrote as text, as dataclasses do."""
    return type(frame.f_locals[code.co_varnames[0]]).__qualname__


def _c_name(function: Any) -> str:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "?")
    return name if module in (None, "builtins") else f"{module}.{name}"
