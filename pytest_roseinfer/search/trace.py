"""Saved traces: format, validation, replay, and protection against untrusted ones.

A trace names Python code to import. So its adapter must be one that this run names itself, and its
file and folders are used only inside the project, unless the run trusts the trace.
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
from pytest_roseinfer.findings.known import digest_of
from pytest_roseinfer.settings import ENDPOINT_TARGET, SHIPPED_TARGETS, Endpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.search.named_checks import Example
    from pytest_roseinfer.settings import KnownFinding

FORMAT = 1
"""Format version of traces; raised when older ones can no longer be read."""
LAST_COMMITS: Mapping[int | str, str] = {
    **dict.fromkeys(("arrives", "cancelled_after", "stops"), "47d57de6"),
    **dict.fromkeys(("SwappedOut", "SwappedIn", "Take"), "a1e4ba7e"),
}
"""Last commits that read formats, operations and request fields that this one cannot, by format
number or name."""
TRUST = "--roseinfer-replay-trust"
FAILED = "failed"
"""Field of the failure's message; missing if the process ended before it was known."""
DIGEST = "digest"
"""Field of the failure's digest, as in files of known findings."""
SERVER = "server"
"""Field of the URL and the model of a server, if one was tested."""
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
    """Error of a file that is not a trace, or cannot be replayed here."""


@dataclass(frozen=True, slots=True)
class ImportPolicy:
    """Imports that a trace may cause."""

    targets: Collection[str]
    """Adapters that this run names, besides the shipped ones."""
    project: Path
    trusted: bool = False
    """True to allow all imports."""

    def check(self, file: str, adapter: str) -> None:
        """Refuse an adapter that is named by the trace alone."""
        if not (self.trusted or adapter in self.targets or adapter in _OURS):
            raise TraceError(
                f"{file}: would import an adapter that this run does not name; add "
                f"--roseinfer-target {adapter} if that is your cache or engine, or {TRUST}"
            )

    def file(self, trace: Mapping[str, Any]) -> str:
        """Return the adapter's file; "" if its module must be found by name."""
        if not trace["file"] or (trace["adapter"] in _OURS and not self.trusted):
            return ""
        return "".join(self._usable([trace["file"]]))

    def folders(self, trace: Mapping[str, Any]) -> list[str]:
        return self._usable(trace["folders"])

    def _usable(self, paths: Iterable[str]) -> list[str]:
        """Return the allowed ones of paths relative to the project's root, as absolute paths."""
        root = self.project.resolve()
        resolved = [(root / path).resolve() for path in paths]
        return [str(path) for path in resolved if self.trusted or path.is_relative_to(root)]


def read(file: str) -> dict[str, Any]:
    """Return the trace in a file; raise ``TraceError`` with the reason if it is invalid."""
    try:
        trace = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        here = ""
        if isinstance(error, FileNotFoundError) and not Path(file).is_absolute():
            here = f" in {Path.cwd()}: replay it in the folder of the run that saved it"
        raise TraceError(f"{file}: {error.strerror}{here}") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file} is not a trace: {error}") from None
    if not (isinstance(trace, dict) and trace.keys() >= _FIELDS.keys()):
        raise TraceError(f"{file} is not a trace: expected the fields {', '.join(sorted(_FIELDS))}")
    if (number := trace.get("format", FORMAT)) != FORMAT:
        raise TraceError(_unreadable(file, trace, f"trace format {number!r}", number))
    for name, kind in _FIELDS.items():
        if not isinstance(trace[name], kind):
            raise TraceError(f"{file} is not a trace: {name} must be a {kind.__name__}")
    recorded = {"folders": trace["folders"], "environment": trace["environment"].values()}
    for name, texts in recorded.items():
        if not all(isinstance(each, str) for each in texts):
            raise TraceError(f"{file} is not a trace: {name} must hold strings")
    if not isinstance(trace.get(FAILED, ""), str):
        raise TraceError(f"{file} is not a trace: {FAILED} must be a str")
    if (server := trace.get(SERVER)) is not None and not _names_server(server):
        raise TraceError(f"{file} is not a trace: {SERVER} must hold the strings url and model")
    return trace


def require_known(
    file: str, trace: Mapping[str, Any], operations: Collection[str], of_requests: Collection[str]
) -> None:
    """Refuse a trace with operations or requests of another version, and name that version."""
    example = trace["example"]
    for step in example.get("operations", ()):
        if isinstance(name := step.get("do"), str) and name not in operations:
            raise TraceError(_unreadable(file, trace, f"the operation {name!r}", name))
    for request in example.get("requests", ()):
        if unknown := [name for name in request if name not in of_requests]:
            problem = f"the field {unknown[0]!r} of a request"
            raise TraceError(_unreadable(file, trace, problem, unknown[0]))


def _unreadable(file: str, trace: Mapping[str, Any], problem: str, key: object) -> str:
    commit = LAST_COMMITS.get(key) if isinstance(key, int | str) else None
    if commit:
        return (
            f"{file}: {problem} can no longer be read; replay it at {commit}, the last commit that "
            "can"
        )
    saved_by = f"; replay it with {trace['version']}, which saved it" if "version" in trace else ""
    return f"{file}: {problem} is unknown to {version()}, which has format {FORMAT}{saved_by}"


def _names_server(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(n), str) for n in ("url", "model"))


def other_version(trace: Mapping[str, Any]) -> list[str]:
    """Return a note if the trace was saved by another version."""
    saved_by, this = trace.get("version", "an unknown older version"), version()
    return [] if saved_by == this else [f"it was saved by {saved_by}, and this is {this}"]


def other_server(trace: Mapping[str, Any], now: Endpoint | None) -> list[str]:
    """Return a note if the trace failed on another server or another model."""
    then = trace.get(SERVER)
    if then is None or now is None or (then["url"], then["model"]) == (now.url, now.model):
        return []
    return [f"it was saved for {Endpoint(then['url'], then['model'])}, and this is {now}"]


def describe_changed_failure(trace: Mapping[str, Any], problem: str) -> list[str]:
    """Return a note if the failure, or "" for none, differs from the recorded one."""
    recorded = trace.get(FAILED, problem)
    # Addresses of objects differ between processes.
    if _ADDRESS.sub("", recorded) == _ADDRESS.sub("", problem):
        return []
    if not problem:
        return [f"it was recorded with: {recorded}"]
    return [
        f"this is another failure: it was recorded with {recorded!r}, and fails now with "
        f"{problem!r}"
    ]


def device_of(trace: Mapping[str, Any]) -> str:
    """Return the device of the example, which is not validated yet."""
    example = trace["example"]
    spec = example.get("spec")
    return str((spec if isinstance(spec, dict) else example).get("device"))


def other_environment(trace: Mapping[str, Any]) -> list[str]:
    """Return a note for each environment variable with another value than when it was saved."""
    return [
        f"{name} was {text!r} when this was saved, and is {os.environ.get(name, 'not set')!r} here"
        for name, text in trace["environment"].items()
        if os.environ.get(name) != text
    ]


# Replay.


def replay(file: str, allowed: ImportPolicy) -> int:
    """Replay the trace in ``file``; return 1 if it still fails, 0 if it passes."""
    trace = read(file)
    allowed.check(file, trace["adapter"])
    if device_of(trace) == "cpu":
        # Before the imports below: Triton reads its switch when kernels are defined.
        settings.choose_kernel_runtime()

    import torch

    from pytest_roseinfer.adapters.load_target import load_target
    from pytest_roseinfer.findings.divergence import Difference
    from pytest_roseinfer.run.watchdog import register_example
    from pytest_roseinfer.search.named_checks import CHECKS, repeat

    _require_check(file, trace)
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
    # The import may register more operations.
    adapter = load_target(trace["adapter"], source)
    example = example_of(file, trace, adapter)
    try:
        with register_example(example):
            repetition = repeat(partial(CHECKS[trace["check"]], adapter, example), adapter.replays)
        repetition.require_none()
    except Difference as failure:
        print(f"FAILED: {failure}")
        _print_changed_failure(trace, failure.summary)
        return 0 if _print_known(trace, digest_of(trace["adapter"], failure), "XFAIL") else 1
    except Exception as error:
        _print_changed_failure(trace, repr(error))
        if _print_known(trace, digest_of(trace["adapter"], error), "XFAIL"):
            return 0
        raise
    print(f"{adapter.describe(example)}\n\n{repetition.describe()}")
    _print_changed_failure(trace, "")
    missed = _print_known(trace, trace.get(DIGEST, ""), "XPASS")
    return 1 if missed and missed.strict else 0


def _require_check(file: str, trace: Mapping[str, Any]) -> None:
    from pytest_roseinfer.search.named_checks import CHECKS

    if trace["check"] not in CHECKS:
        raise TraceError(f"{file} is not a trace of this version: unknown check {trace['check']}")


def example_of(file: str, trace: Mapping[str, Any], adapter: type[Adapter]) -> Example:
    """Return the example of a trace of an adapter; raise ``TraceError`` if it is invalid."""
    from pytest_roseinfer.adapters.engine import EngineAdapter, RequestSpec
    from pytest_roseinfer.capabilities.operation import OPERATIONS
    from pytest_roseinfer.engine_capabilities.capability import for_adapter
    from pytest_roseinfer.search.named_checks import kind_of_example

    _require_check(file, trace)
    try:
        engine = issubclass(adapter, EngineAdapter)
        of_requests = fields(for_adapter(adapter, RequestSpec((0,)))) if engine else ()
        require_known(file, trace, OPERATIONS, {each.name for each in of_requests})
        return kind_of_example(trace["check"]).from_json(trace["example"])
    except TraceError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TraceError(
            f"{file}: its example is invalid: {type(error).__name__}: {error}"
        ) from None


def _print_known(trace: Mapping[str, Any], digest: str, outcome: str) -> KnownFinding | None:
    """Print and return the known finding of the trace's adapter with a digest; None without one."""
    known = settings.current().known_of(trace["adapter"]).get(digest)
    if known:
        print(f"\n{outcome}: {known}")
    return known


def _print_changed_failure(trace: Mapping[str, Any], problem: str) -> None:
    for line in describe_changed_failure(trace, problem):
        print(f"\n{line}")
