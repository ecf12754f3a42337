"""Counting the calls that the code under test makes, by function.

A call counts if the caller or the called function is under test. Calls between libraries are
left out, since they change with every release; what libraries make the device do is counted as
torch operations.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer.gates.work.triton_launches import interpreted_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CodeType, FrameType

_TOOLS = frozenset({"pytest_roseinfer", "triton"})
"""These are no code under test: we count, and calls into Triton are counted as launches."""


class OwnCode:
    """The code under test: ``packages`` if any are named, else whatever is not installed."""

    def __init__(self, packages: Sequence[str] = ()) -> None:
        self.packages = frozenset(packages)

    def is_own(self, module: str) -> bool:
        root = module.partition(".")[0]
        return root in self.packages if self.packages else not _is_library(root)

    def concerns(self, frame: FrameType) -> bool:
        """Return True if a frame is one of this code, or was called by it."""
        module, caller = _module(frame), frame.f_back
        if self.is_own(module):
            return True
        called_by_own = caller is not None and self.is_own(_module(caller))
        return called_by_own and module.partition(".")[0] not in _TOOLS


@cache
def _is_library(root: str) -> bool:
    """Return True for a top-level module that is installed, built in, or none at all."""
    if root in _TOOLS or root in sys.builtin_module_names:
        return True
    module = sys.modules.get(root)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    paths = sysconfig.get_paths()
    installed = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    found = [Path(place) for place in places if place]
    return not found or any(place.is_relative_to(each) for place in found for each in installed)


def count_python_calls(step: Callable[[], object], own: OwnCode) -> defaultdict[str, Counter[str]]:
    """Run ``step`` and count, by group and name, how often each function was entered.

    Functions written in C count too. Calls that wait for the device or replay a graph come in
    groups of their own, whoever makes them. The tracers of other tools, such as coverage's, are
    not counted, because Python calls them with profiling off.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    calls = counts["python_calls"]
    by_code = _torch_functions()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if own.concerns(frame):
                calls[_python_name(frame)] += 1
            if known := by_code.get(frame.f_code):
                group, name = known
                counts[group][name] += 1
        elif event == "c_call" and own.is_own(_module(frame)):
            calls[_c_name(arg)] += 1

    @contextmanager
    def uncounted() -> Iterator[None]:
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(profile)

    before = sys.getprofile()
    with interpreted_launches(lambda _kernel: None, uncounted):
        sys.setprofile(profile)
        try:
            step()
        finally:
            _profile_again(before)
    return counts


def _profile_again(before: Any) -> None:
    """Let in what profiled before; Python takes no cProfile back by itself."""
    if callable(before) or before is None:
        sys.setprofile(before)
    else:
        sys.setprofile(None)
        before.enable()


def _torch_functions() -> dict[CodeType, tuple[str, str]]:
    """Return the functions that wait for a device or replay a graph, with the group of each.

    No torch operation shows these calls. The functions are known by their code, since callers
    may have imported them under any name.
    """
    waiting = (torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator, torch.cpu)
    found = {
        owner.synchronize.__code__: ("synchronisations", f"{owner.__name__}.synchronize")
        for owner in waiting
    }
    return found | {torch.cuda.CUDAGraph.replay.__code__: ("graph_replays", "replays")}


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _python_name(frame: FrameType) -> str:
    code = frame.f_code
    name = code.co_qualname
    if code.co_filename == "<string>" and code.co_argcount:
        # A method that was generated as text, as dataclasses do, has no class in its name.
        owner = type(frame.f_locals[code.co_varnames[0]])
        name = f"{owner.__qualname__}.{code.co_name}"
    return f"{_module(frame)}.{name}"


def _c_name(function: Any) -> str:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "?")
    return name if module in (None, "builtins") else f"{module}.{name}"
