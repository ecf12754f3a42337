"""The process that runs one side's decode step when it is told to, and says how long it took.

It is run as a file and uses only the standard library, so that it works the same whatever the
side's own tree holds; it imports the step from there. It reads and answers lines of JSON.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES = ("torch", "triton", "transformers", "numpy")
"""Libraries that decide how fast a step is."""
_DEFAULTS = {"floor_seconds": None, "path_counts": dict, "clock": time.perf_counter}
OFFERS = {"step", "tokens", *_DEFAULTS}
"""The keys of what a factory returns."""


class Lacking(Exception):
    """The side does not have the step, or what the step is made of; the message says what."""


class Refused(Exception):
    """The step cannot be made; the message says all that there is to say about it."""


def make_target(factory: Callable[[], Any]) -> dict[str, Any]:
    """Return what the factory offers, with a default for each key it may leave out."""
    offered = factory()
    if not isinstance(offered, dict) or not {"step", "tokens"} <= offered.keys():
        raise Refused(f"the factory returned {offered!r}: expected 'step' and 'tokens'")
    if unknown := offered.keys() - OFFERS:
        raise Refused(f"the factory returned {sorted(unknown)}, which mean nothing here")
    if not callable(offered["step"]):
        raise Refused(f"the factory returned a step that is no function, but {offered['step']!r}")
    if not isinstance(offered["tokens"], int) or offered["tokens"] < 1:
        raise Refused(f"a step that brings {offered['tokens']!r} tokens is no decode step")
    return {**_DEFAULTS, **offered}


def host_seconds(target: dict[str, Any], steps: int) -> list[float]:
    """Time each step by the clock; reading it costs less than a microsecond."""
    step, clock = target["step"], target["clock"]
    times = [clock()]
    for _ in range(steps):
        step()
        times.append(clock())
    return [end - begin for begin, end in pairwise(times)]


def cuda_seconds(target: dict[str, Any], steps: int) -> list[float]:
    """Time each step between events on the GPU; the host waits once, at the end."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        target["step"]()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]


def import_from(name: str, file: str) -> Any:
    """Import the side's own module, or else ``file``: a revision may be older than the module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{name}.".startswith(f"{error.name}.")):
            raise
        if not file:
            raise Refused(f"there is no module {error.name!r}") from None
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise Lacking(f"{name} of this project needs what is not there: {error}") from None
    return module


def find_factory(said: str, file: str) -> Any:
    """Return the side's own function, by ``module:function``."""
    name, _, function = said.partition(":")
    module = import_from(name, file)
    if not hasattr(module, function):
        raise Lacking(f"{name} has no function {function!r}")
    return getattr(module, function)


def own_modules(roots: list[str]) -> list[str]:
    """Return the top-level modules that were imported from the side's tree."""
    own = set()
    for name, module in [*sys.modules.items()]:
        file = os.path.realpath(getattr(module, "__file__", None) or "")
        if any(file.startswith(root + os.sep) for root in roots):
            own.add(name.partition(".")[0])
    return sorted(own)


def describe(target: dict[str, Any], roots: list[str]) -> dict[str, Any]:
    """Return what ``Ready`` holds about the step and where it runs."""
    versions = {"python": sys.version.split()[0]}
    if imported := [name for name in _NAMES if name in sys.modules]:
        from importlib import metadata  # this import takes longer than many a worker lives

        versions |= {name: metadata.version(name) for name in imported}
    torch = sys.modules.get("torch")
    return {
        "tokens": target["tokens"],
        "floor_seconds": target["floor_seconds"],
        "own_modules": own_modules(roots),
        "device": torch.cuda.get_device_name() if torch and torch.cuda.is_initialized() else "cpu",
        "versions": versions,
    }


def main() -> None:
    """Load the step, then run it as often as each line says; a 0 asks for the path counts."""
    asked = json.loads(sys.argv[1])
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # the files beside this one are none of the side's modules
    if asked["cpus"]:
        os.sched_setaffinity(0, asked["cpus"])
    # What the side prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        target = make_target(find_factory(asked["factory"], asked["file"]))
        measure = cuda_seconds if asked["cuda"] else host_seconds
        answer(describe(target, asked["roots"]))
        while line := sys.stdin.readline():
            steps = json.loads(line)
            answer(measure(target, steps) if steps else dict(target["path_counts"]()))
    except Lacking as lacking:
        answer({"lacks": str(lacking), "own_modules": own_modules(asked["roots"])})
    except Refused as refused:
        answer({"error": str(refused)})
    except Exception:
        answer({"error": traceback.format_exc()})


def leave() -> NoReturn:
    """End after exit handlers, but leave modules as they are: to take torch apart costs 0.5 s."""
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    leave()
