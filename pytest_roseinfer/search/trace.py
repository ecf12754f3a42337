"""A saved trace: what it holds, and what of it may be used where somebody else wrote it.

A trace names Python to be imported. So its adapter must be one that this run names itself, and a
file or folder of it is used only inside the project, unless the run trusts it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.environment import version
from pytest_roseinfer.settings import ENDPOINT_TARGET, SHIPPED_TARGETS, Endpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

FORMAT = 1
"""Number of the format of traces, which rises when older ones cannot be read any more."""
LAST_COMMITS: Mapping[int | str, str] = {
    **dict.fromkeys(("arrives", "cancelled_after", "stops"), "47d57de6"),
    **dict.fromkeys(("SwappedOut", "SwappedIn", "Take"), "a1e4ba7e"),
}
"""Last commit that reads what this one cannot, by a format number or the name of an operation or
of a request's field."""
TRUST = "--roseinfer-replay-trust"
FAILED = "failed"
"""The field of what was wrong when a trace was saved; not there if the process ended before."""
SERVER = "server"
"""The field of the address and the model of a server, if one was tested."""
_OURS = (*SHIPPED_TARGETS, ENDPOINT_TARGET)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_FIELDS: Mapping[str, type[Any]] = {
    "adapter": str,
    "file": str,
    "folders": list,
    "environment": dict,
    "check": str,
    "example": dict,
}


class TraceError(ValueError):
    """A file holds no trace, or one that cannot be run here."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a trace may have imported."""

    targets: Collection[str]
    """The adapters that this run names, beside the shipped ones."""
    project: Path
    trusted: bool = False
    """Whatever it names."""

    def check(self, file: str, adapter: str) -> None:
        """Refuse an adapter that nobody but the trace names."""
        if not (self.trusted or adapter in self.targets or adapter in _OURS):
            raise TraceError(
                f"{file} names Python to be imported that this run does not: add "
                f"--roseinfer-target {adapter} if that is your cache or engine, or {TRUST}"
            )

    def file(self, trace: Mapping[str, Any]) -> str:
        """Return the adapter's file, or nothing where its module must be found without."""
        if not trace["file"] or (trace["adapter"] in _OURS and not self.trusted):
            return ""
        return "".join(self._usable([trace["file"]]))

    def folders(self, trace: Mapping[str, Any]) -> list[str]:
        return self._usable(trace["folders"])

    def _usable(self, paths: Iterable[str]) -> list[str]:
        """Return paths from the root of the project that this run may use, as they are here."""
        root = self.project.resolve()
        found = [(root / path).resolve() for path in paths]
        return [str(path) for path in found if self.trusted or path.is_relative_to(root)]


def read(file: str) -> dict[str, Any]:
    """Return the trace in a file; say what is wrong, and where, if there is none."""
    try:
        trace = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        here = ""
        if isinstance(error, FileNotFoundError) and not Path(file).is_absolute():
            here = f" in {Path.cwd()}: replay it in the folder of the run that saved it"
        raise TraceError(f"{file}: {error.strerror}{here}") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file} is no trace: {error}") from None
    if not (isinstance(trace, dict) and trace.keys() >= _FIELDS.keys()):
        raise TraceError(f"{file} is no trace: expected the fields {', '.join(sorted(_FIELDS))}")
    if (number := trace.get("format", FORMAT)) != FORMAT:
        raise TraceError(_unreadable(file, trace, f"trace format {number!r}", number))
    for name, kind in _FIELDS.items():
        if not isinstance(trace[name], kind):
            raise TraceError(f"{file} is no trace: {name} must be a {kind.__name__}")
    held = {"folders": trace["folders"], "environment": trace["environment"].values()}
    for name, texts in held.items():
        if not all(isinstance(each, str) for each in texts):
            raise TraceError(f"{file} is no trace: {name} must hold texts")
    if not isinstance(trace.get(FAILED, ""), str):
        raise TraceError(f"{file} is no trace: {FAILED} must be a str")
    if (server := trace.get(SERVER)) is not None and not _names_server(server):
        raise TraceError(f"{file} is no trace: {SERVER} must hold the texts url and model")
    return trace


def require_known(
    file: str, trace: Mapping[str, Any], operations: Collection[str], of_requests: Collection[str]
) -> None:
    """Refuse a trace with operations or requests of another version, and say which one reads it."""
    example = trace["example"]
    for step in example.get("operations", ()):
        if isinstance(name := step.get("do"), str) and name not in operations:
            raise TraceError(_unreadable(file, trace, f"the operation {name!r}", name))
    for request in example.get("requests", ()):
        if unknown := [name for name in request if name not in of_requests]:
            what = f"the field {unknown[0]!r} of a request"
            raise TraceError(_unreadable(file, trace, what, unknown[0]))


def _unreadable(file: str, trace: Mapping[str, Any], what: str, key: object) -> str:
    commit = LAST_COMMITS.get(key) if isinstance(key, int | str) else None
    if commit:
        return (
            f"{file}: {what} can no longer be read; replay it at {commit}, the last commit that can"
        )
    saved_by = f"; replay it with {trace['version']}, which saved it" if "version" in trace else ""
    return f"{file}: {what} is unknown to {version()}, which has format {FORMAT}{saved_by}"


def _names_server(told: object) -> bool:
    return isinstance(told, dict) and all(isinstance(told.get(n), str) for n in ("url", "model"))


def other_version(trace: Mapping[str, Any]) -> list[str]:
    """Say by which version it was saved, if that was another."""
    saved_by, own = trace.get("version", "an older version, which does not say which"), version()
    return [] if saved_by == own else [f"it was saved by {saved_by}, and this is {own}"]


def other_server(trace: Mapping[str, Any], now: Endpoint | None) -> list[str]:
    """Say on which server it failed, if this is another one or another model of it."""
    then = trace.get(SERVER)
    if then is None or now is None or (then["url"], then["model"]) == (now.url, now.model):
        return []
    return [f"it was saved of {Endpoint(then['url'], then['model'])}, and this is {now}"]


def failed_otherwise(trace: Mapping[str, Any], what: str) -> list[str]:
    """Say so if what is wrong now, which may be nothing, is not what was recorded."""
    recorded = trace.get(FAILED, what)
    # No object lies where it lay in another process.
    if _ADDRESS.sub("", recorded) == _ADDRESS.sub("", what):
        return []
    if not what:
        return [f"it was recorded with: {recorded}"]
    return [
        f"this is another failure: it was recorded with {recorded!r}, and fails now with {what!r}"
    ]


def device_of(trace: Mapping[str, Any]) -> str:
    """Return the device of the example, which need not make sense yet."""
    example = trace["example"]
    spec = example.get("spec")
    return str((spec if isinstance(spec, dict) else example).get("device"))


def other_environment(trace: Mapping[str, Any]) -> list[str]:
    """Say of each variable that was set otherwise when the trace was saved; none is set here."""
    return [
        f"{name} was {text!r} when this was saved, and is {os.environ.get(name, 'not set')!r} here"
        for name, text in trace["environment"].items()
        if os.environ.get(name) != text
    ]


# Running a saved trace again.


def replay(file: str, allowed: Allowed) -> int:
    """Run what is in ``file``; return 1 when it still fails, 0 when it runs through."""
    trace = read(file)
    allowed.check(file, trace["adapter"])
    if device_of(trace) == "cpu":
        # Triton reads its switch when kernels are defined, which the imports below do.
        settings.choose_kernel_runtime()

    import torch

    from pytest_roseinfer.adapters.engine import EngineAdapter, RequestSpec
    from pytest_roseinfer.adapters.load_target import load_target
    from pytest_roseinfer.capabilities.operation import OPERATIONS
    from pytest_roseinfer.engine_capabilities.capability import for_adapter
    from pytest_roseinfer.findings.divergence import Difference
    from pytest_roseinfer.run.watchdog import watched
    from pytest_roseinfer.search.checks import CHECKS, kind_of_example, repeat

    if trace["check"] not in CHECKS:
        raise TraceError(f"{file} is no trace of this version: there is no check {trace['check']}")
    device = device_of(trace)
    if device.startswith("cuda") and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise TraceError(
            f'{file} was recorded on "{device}", which this machine does not have; change '
            '"device" in the file to replay it elsewhere'
        )
    for line in (
        *other_version(trace),
        *other_environment(trace),
        *other_server(trace, settings.current().endpoint),
    ):
        print(line)
    source = allowed.file(trace)
    print(f"replaying on {trace['adapter']} ({trace['check']})")
    print(f"importing it{f' from {source}' if source else ''}\n")
    sys.path[:0] = [folder for folder in allowed.folders(trace) if folder not in sys.path]
    # This may register operations of its own.
    adapter = load_target(trace["adapter"], source)
    try:
        engine = issubclass(adapter, EngineAdapter)
        of_requests = fields(for_adapter(adapter, RequestSpec((0,)))) if engine else ()
        require_known(file, trace, OPERATIONS, {each.name for each in of_requests})
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
    print(f"{adapter.describe(example)}\n\n{repetition.words()}")
    _say_if_otherwise(trace, "")
    return 0


def _say_if_otherwise(trace: Mapping[str, Any], what: str) -> None:
    for line in failed_otherwise(trace, what):
        print(f"\n{line}")
