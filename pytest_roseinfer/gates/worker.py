"""Worker process that runs one side's decode step on request and reports the times.

It is run as a file and uses only the standard library, so that it works the same for any tree; it
imports the step from the side's tree. Requests and responses are lines of JSON.
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
"""Libraries whose versions affect the speed of a step."""
_DEFAULTS = {"floor_seconds": None, "path_counts": dict, "clock": time.perf_counter}
TARGET_KEYS = {"step", "tokens", *_DEFAULTS}
"""Keys that a factory's result may have."""


class StepNotFound(Exception):
    """Error of a side that lacks the step, or something it needs; the message has the details."""


class InvalidFactory(Exception):
    """Error of a factory that cannot make the step; its message needs no traceback."""


def make_target(factory: Callable[[], Any]) -> dict[str, Any]:
    """Return the factory's result, with defaults for optional keys."""
    target = factory()
    if not isinstance(target, dict) or not {"step", "tokens"} <= target.keys():
        raise InvalidFactory(f"the factory returned {target!r}: expected 'step' and 'tokens'")
    if unknown := target.keys() - TARGET_KEYS:
        raise InvalidFactory(f"the factory returned unknown keys {sorted(unknown)}")
    if not callable(target["step"]):
        raise InvalidFactory(
            f"the factory returned a step that is not a function: {target['step']!r}"
        )
    if not isinstance(target["tokens"], int) or target["tokens"] < 1:
        raise InvalidFactory(
            f"tokens is {target['tokens']!r}: a decode step generates 1 token or more"
        )
    return {**_DEFAULTS, **target}


def host_seconds(target: dict[str, Any], steps: int) -> list[float]:
    """Time each step with the clock, which takes less than a microsecond to read."""
    step, clock = target["step"], target["clock"]
    times = [clock()]
    for _ in range(steps):
        step()
        times.append(clock())
    return [end - begin for begin, end in pairwise(times)]


def cuda_seconds(target: dict[str, Any], steps: int) -> list[float]:
    """Time each step with GPU events; the host waits once, at the end."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        target["step"]()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]


def import_from(name: str, file: str) -> Any:
    """Import the side's own module, else ``file``: a revision may be older than the module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{name}.".startswith(f"{error.name}.")):
            raise
        if not file:
            raise InvalidFactory(f"module {error.name!r} does not exist") from None
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise StepNotFound(
            f"{name} of this project needs something that is missing there: {error}"
        ) from None
    return module


def find_factory(reference: str, file: str) -> Any:
    """Return the side's own function for ``module:function``."""
    name, _, function = reference.partition(":")
    module = import_from(name, file)
    if not hasattr(module, function):
        raise StepNotFound(f"{name} has no function {function!r}")
    return getattr(module, function)


def own_modules(roots: list[str]) -> list[str]:
    """Return the top-level modules that were imported from the side's tree."""
    names = set()
    for name, module in [*sys.modules.items()]:
        file = os.path.realpath(getattr(module, "__file__", None) or "")
        if any(file.startswith(root + os.sep) for root in roots):
            names.add(name.partition(".")[0])
    return sorted(names)


def describe(target: dict[str, Any], roots: list[str]) -> dict[str, Any]:
    """Return the fields of ``Ready``: the step and its environment."""
    versions = {"python": sys.version.split()[0]}
    if imported := [name for name in _NAMES if name in sys.modules]:
        from importlib import metadata  # slow to import, so only if needed

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
    """Load the step, then run it as many times as each line says; 0 requests the path counts."""
    request = json.loads(sys.argv[1])
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # the modules next to this file are not the side's
    if request["cpus"]:
        os.sched_setaffinity(0, request["cpus"])
    # Prints of the side's code must not mix with the responses.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        target = make_target(find_factory(request["factory"], request["file"]))
        measure = cuda_seconds if request["cuda"] else host_seconds
        answer(describe(target, request["roots"]))
        while line := sys.stdin.readline():
            steps = json.loads(line)
            answer(measure(target, steps) if steps else dict(target["path_counts"]()))
    except StepNotFound as lacking:
        answer({"lacks": str(lacking), "own_modules": own_modules(request["roots"])})
    except InvalidFactory as refused:
        answer({"error": str(refused)})
    except Exception:
        answer({"error": traceback.format_exc()})


def exit_process() -> NoReturn:
    """Exit after exit handlers, but without module teardown, which takes 0.5 s for torch."""
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    exit_process()
