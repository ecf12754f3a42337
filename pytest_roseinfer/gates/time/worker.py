"""The process that runs one side's decode step, when it is told to, and says how long it took.

Run as a file, with nothing but the standard library, so that it works the same whatever the
side's own tree holds; what it measures it imports from there. One line of JSON in, one out.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NAMES = ("torch", "triton", "transformers", "numpy")
OFFERS = {"step", "tokens", "floor_seconds", "path_counts", "clock"}


@dataclass(frozen=True, slots=True)
class Target:
    """The step that a factory returned, and what it offers beside it."""

    step: Callable[[], object]
    tokens: int
    floor_seconds: float | None
    path_counts: Callable[[], Mapping[str, int]]
    clock: Callable[[], float]

    @classmethod
    def of(cls, offered: Any) -> Target:
        if not isinstance(offered, dict) or not {"step", "tokens"} <= offered.keys():
            raise TypeError(f"the factory returned {offered!r}: expected 'step' and 'tokens'")
        if unknown := offered.keys() - OFFERS:
            raise TypeError(f"the factory returned {sorted(unknown)}, which mean nothing here")
        if not isinstance(offered["tokens"], int) or offered["tokens"] < 1:
            raise TypeError(f"a step that brings {offered['tokens']!r} tokens is no decode step")
        return cls(
            step=offered["step"],
            tokens=offered["tokens"],
            floor_seconds=offered.get("floor_seconds"),
            path_counts=offered.get("path_counts", dict),
            clock=offered.get("clock", time.perf_counter),
        )


def host_seconds(target: Target, steps: int) -> list[float]:
    """Time each step by the clock; reading it costs less than a microsecond."""
    step, clock = target.step, target.clock
    times = [clock()]
    for _ in range(steps):
        step()
        times.append(clock())
    return [end - begin for begin, end in zip(times, times[1:])]  # noqa: B905, RUF007


def cuda_seconds(target: Target, steps: int) -> list[float]:
    """Time each step between events on the GPU; the host waits once, at the end."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        target.step()
        event.record()
    torch.cuda.synchronize()
    return [
        begin.elapsed_time(end) / 1e3
        for begin, end in zip(events, events[1:])  # noqa: B905, RUF007
    ]


def load(name: str, file: str, roots: list[str]) -> tuple[Target, dict[str, Any]]:
    """The step that ``module:function`` makes, and what can be said about where it runs."""
    module, _, function = name.partition(":")
    target = Target.of(getattr(import_from(module, file), function)())
    return target, {
        "tokens": target.tokens,
        "floor_seconds": target.floor_seconds,
        "own_modules": sorted(own_modules(roots)),
        "device": device(),
        "versions": {"python": sys.version.split()[0], **versions()},
    }


def import_from(name: str, file: str) -> Any:
    """The side's own module of that name, or else ``file``: a revision may be older than it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (file and error.name and f"{name}.".startswith(f"{error.name}.")):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def own_modules(roots: list[str]) -> set[str]:
    """Packages and modules that came from one of ``roots``."""
    found = set()
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if any(os.path.realpath(file).startswith(root + os.sep) for root in roots):
            found.add(name.partition(".")[0])
    return found


def device() -> str:
    """The GPU by name where the step uses one, else the CPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return str(torch.cuda.get_device_name())
    return "cpu"


def versions() -> dict[str, str]:
    """Name the versions of imported libraries that decide how fast a step is."""
    if not (imported := [name for name in _NAMES if name in sys.modules]):
        return {}
    from importlib import metadata  # which takes longer than many a worker lives

    return {name: metadata.version(name) for name in imported}


def serve(asked: dict[str, Any], read: Callable[[], str], answer: Callable[[Any], None]) -> None:
    """Load the step, then run it as often as each line says; an empty line asks for counts."""
    target, ready = load(asked["factory"], asked["file"], asked["roots"])
    measure = cuda_seconds if asked["cuda"] else host_seconds
    answer(ready)
    while line := read():
        steps = json.loads(line)
        answer(measure(target, steps) if steps else dict(target.path_counts()))


def main() -> None:
    asked = json.loads(sys.argv[1])
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # our neighbours are none of the side's modules
    if asked["cpus"]:
        os.sched_setaffinity(0, asked["cpus"])
    # What the side prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        serve(asked, sys.stdin.readline, answer)
    except Exception:
        answer({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
