"""Running a saved trace again."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.search import trace as traces
from pytest_roseinfer.search.trace import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_roseinfer.search.trace import Allowed


def replay(file: str, allowed: Allowed) -> int:
    """Run what is in ``file``; return 1 when it still fails, 0 when it runs through."""
    trace = traces.read(file)
    allowed.check(file, trace["adapter"])
    if traces.device_of(trace) == "cpu":
        # Triton reads its switch when kernels are defined, which the imports below do.
        settings.choose_kernel_runtime()

    import torch

    from pytest_roseinfer.adapters.load_target import load_target
    from pytest_roseinfer.capabilities.operation import OPERATIONS
    from pytest_roseinfer.findings.divergence import Difference
    from pytest_roseinfer.run.watchdog import watched
    from pytest_roseinfer.search.checks import CHECKS, kind_of_example, repeat

    if trace["check"] not in CHECKS:
        raise TraceError(f"{file} is no trace of this version: there is no check {trace['check']}")
    device = traces.device_of(trace)
    if device.startswith("cuda") and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise TraceError(
            f'{file} was recorded on "{device}", which this machine does not have; change '
            '"device" in the file to replay it elsewhere'
        )
    for line in (
        *traces.other_version(trace),
        *traces.other_environment(trace),
        *traces.other_server(trace, settings.current().endpoint),
    ):
        print(line)
    source = allowed.file(trace)
    print(f"replaying on {trace['adapter']} ({trace['check']})")
    print(f"importing it{f' from {source}' if source else ''}\n")
    sys.path[:0] = [folder for folder in allowed.folders(trace) if folder not in sys.path]
    # This may register operations of its own.
    adapter = load_target(trace["adapter"], source)
    try:
        traces.require_operations(file, trace, OPERATIONS)
        example = kind_of_example(trace["check"]).from_json(trace["example"])
    except TraceError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TraceError(f"{file}: its example is none: {type(error).__name__}: {error}") from None
    try:
        with watched(example):
            repetition = repeat(partial(CHECKS[trace["check"]], adapter, example), adapter.replays)
        repetition.require_none()
    except Difference as failure:
        print(f"FAILED: {failure}")
        _say_if_otherwise(trace, failure.what)
        return 1
    except Exception as error:
        _say_if_otherwise(trace, repr(error))
        raise
    print(f"{adapter.in_words(example)}\n\n{repetition.words()}")
    _say_if_otherwise(trace, "")
    return 0


def _say_if_otherwise(trace: Mapping[str, Any], what: str) -> None:
    for line in traces.failed_otherwise(trace, what):
        print(f"\n{line}")
