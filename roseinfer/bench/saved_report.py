"""Reads a report that ``--json`` wrote, and says at which place it is none."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from roseinfer.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

_TEXT, _NUMBER, _MAYBE_NUMBER = "a text", "a number", "a number or null"
_RANKS = dict.fromkeys(("p50_ms", "p95_ms", "p99_ms"), _MAYBE_NUMBER)
_SHARED: dict[str, Any] = {
    "config": {"model": _TEXT, "weights": _TEXT, "dtype": _TEXT},
    "machine": {"device": _TEXT, "torch": _TEXT},
    "date": _TEXT,
}
_SERVING: dict[str, Any] = {
    "tables": {
        "throughput": [
            {
                "run": _TEXT,
                "completion_tok_per_s": _MAYBE_NUMBER,
                "decode_tok_per_s": _MAYBE_NUMBER,
            }
        ],
        "latencies": [{"run": _TEXT, "what": _TEXT, **_RANKS}],
        "peers": [{"system": _TEXT, "completion_tok_per_s": _MAYBE_NUMBER}],
    }
}
_LADDER: dict[str, Any] = {
    "facts": {"floor_ms": _NUMBER},
    "tables": {
        "rungs": [
            {
                "rung": _TEXT,
                "step_ms": _MAYBE_NUMBER,
                "fastest_ms": _MAYBE_NUMBER,
                "slowest_ms": _MAYBE_NUMBER,
                "itl_at_boundary_p99_ms": _MAYBE_NUMBER,
            }
        ],
        "peers": [{"system": _TEXT, "ms_per_step": _MAYBE_NUMBER}],
    },
}
_TRACE: dict[str, Any] = {
    "tables": {
        "steps": [{"sequences": _NUMBER}],
        "spans": [{"sequences": _NUMBER, "who": _TEXT, "begin_us": _NUMBER, "end_us": _NUMBER}],
    }
}
_DRAWN_FROM: dict[str, Any] = {
    name: {**_SHARED, **own}
    for name, own in {
        "scheduler": _SERVING,
        "streaming": _SERVING,
        "ladder": _LADDER,
        "trace": _TRACE,
    }.items()
}
"""What the chart of each benchmark is drawn from, in the report's own shape."""
_MAY_BE_EMPTY = ("tables.peers", "tables.spans")


def read(file: Path) -> dict[str, Any]:
    """Return a report that a chart can be drawn from."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text, at byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{file} is no JSON, at {where}: {error.msg}") from None
    if not isinstance(report, dict) or not isinstance(report.get("benchmark"), str):
        raise ConfigError(f"{file} is no report of a benchmark, as --json writes it")
    benchmark = report["benchmark"]
    if benchmark not in _DRAWN_FROM:
        alike = did_you_mean(benchmark, _DRAWN_FROM)
        raise ConfigError(f"{file} is a report of {benchmark!r}, which has no chart{alike}")
    if wrong := _wrong(report, _DRAWN_FROM[benchmark], ""):
        raise ConfigError(f"{file}: {wrong}")
    return report


def _wrong(found: Any, wanted: Any, place: str) -> str:
    """Say at which place something else stands than what is wanted, or return an empty text."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return _unlike(found, "an object", place)
        dot = place and f"{place}."
        parts = (
            _wrong(found[name], each, dot + name) if name in found else f"{dot}{name} is missing"
            for name, each in wanted.items()
        )
        return next(filter(None, parts), "")
    if isinstance(wanted, list):
        if not isinstance(found, list) or not (found or place in _MAY_BE_EMPTY):
            return _unlike(found, "a list of rows", place)
        rows = (_wrong(row, wanted[0], f"{place}[{at}]") for at, row in enumerate(found))
        return next(filter(None, rows), "")
    return "" if _is(found, wanted) else _unlike(found, wanted, place)


def _is(found: Any, wanted: str) -> bool:
    if wanted == _TEXT:
        return isinstance(found, str)
    if found is None:
        return wanted == _MAYBE_NUMBER
    return isinstance(found, int | float) and math.isfinite(found)


def _unlike(found: Any, wanted: str, place: str) -> str:
    return f"{place} is {json.dumps(found)[:40]}, and must be {wanted}"
