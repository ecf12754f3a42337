"""Traces as untrusted input: only targets that the run names are imported."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import CacheSpec, History
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.environment import version
from pytest_roseinfer.search import trace as traces
from pytest_roseinfer.search.trace import FORMAT, ImportPolicy, TraceError, replay
from tests.capabilities.caches.list_cache import ListCache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

SHIPPED = "pytest_roseinfer.targets.roseinfer_kv:GroupedManager"
EXIT_WHEN_IMPORTED = "raise SystemExit('it was imported')"


def write(folder: Path, **changed_fields: Any) -> str:
    """Write a trace of one append to a shipped cache, with the given fields changed."""
    trace = {
        "adapter": SHIPPED,
        "file": "",
        "folders": [],
        "environment": {},
        "check": "run_history",
        "example": History(CacheSpec(), (Append((0,)),)).to_json(),
    }
    file = folder / "trace.json"
    file.write_text(json.dumps({**trace, **changed_fields}))
    return str(file)


@pytest.fixture
def policy(tmp_path: Path) -> ImportPolicy:
    (tmp_path / "project").mkdir()
    return ImportPolicy(targets={"named:Cache"}, project=tmp_path / "project")


def test_adapter_of_a_trace_is_not_imported_unless_named(
    tmp_path: Path, policy: ImportPolicy
) -> None:
    (tmp_path / "evil.py").write_text(EXIT_WHEN_IMPORTED)
    other_target = {"adapter": "evil:Cache", "file": str(tmp_path / "evil.py")}
    with pytest.raises(TraceError, match=r"--roseinfer-target evil:Cache .* --roseinfer-rep"):
        replay(write(tmp_path, **other_target), policy)
    with pytest.raises(SystemExit):
        replay(
            write(tmp_path, **other_target), ImportPolicy((), tmp_path / "project", trusted=True)
        )


def test_file_outside_the_project_is_not_imported_under_an_allowed_name(
    tmp_path: Path, policy: ImportPolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    outside, inside = tmp_path / "evil.py", policy.project / "mine.py"
    outside.write_text(EXIT_WHEN_IMPORTED)
    inside.write_text("")
    assert replay(write(tmp_path, file=str(outside), folders=[str(tmp_path)]), policy) == 0
    assert "importing it\n" in capsys.readouterr().out
    target_fields = {"adapter": "named:Cache", "folders": [str(tmp_path), str(policy.project)]}
    assert policy.file({**target_fields, "file": str(outside)}) == ""
    assert policy.file({**target_fields, "file": str(inside)}) == str(inside)
    assert policy.folders(target_fields) == [str(policy.project)]


def test_replay_reports_environment_variables_without_setting_them(
    tmp_path: Path,
    policy: ImportPolicy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TRITON_DEBUG", raising=False)
    replay(write(tmp_path, environment={"TRITON_DEBUG": "1"}), policy)
    message = capsys.readouterr().out
    assert "TRITON_DEBUG was '1' when this was saved, and is 'not set' here" in message
    assert "TRITON_DEBUG" not in os.environ


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "a path for a list": ({"folders": "src"}, "trace.json is not a trace: folders must be a list"),
    "numbers": ({"environment": {"X": 1}}, "environment must hold strings"),
    "a list for an example": ({"example": []}, "example must be a dict"),
    "an unknown check": ({"check": "os.system"}, "unknown check os.system"),
    "a number as message": ({"failed": 1}, "trace.json is not a trace: failed must be a str"),
    "no operations": ({"example": {"spec": {}}}, "its example is invalid: KeyError: 'operations'"),
    "a step without an operation": (
        {"example": {"spec": {}, "finite": True, "operations": [{}]}},
        "its example is invalid: KeyError: 'do'",
    ),
    "a number as step": (
        {"example": {"spec": {}, "finite": True, "operations": [1]}},
        "its example is invalid: ",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_field_is_named(case: str, tmp_path: Path, policy: ImportPolicy) -> None:
    changed_fields, message = MALFORMED[case]
    with pytest.raises(TraceError) as error:
        replay(write(tmp_path, **changed_fields), policy)
    assert message in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "trace.json"))


def test_paths_are_relative_to_the_project(tmp_path: Path, policy: ImportPolicy) -> None:
    here = str(policy.project)
    target_fields = {
        "adapter": "named:Cache",
        "file": "tests/mine.py",
        "folders": ["tests", "..", here],
    }
    assert policy.file(target_fields) == f"{here}/tests/mine.py"
    assert policy.folders(target_fields) == [f"{here}/tests", here]
    trusted = ImportPolicy((), policy.project, trusted=True)
    assert trusted.folders(target_fields) == [f"{here}/tests", str(tmp_path), here]


@pytest.mark.parametrize(
    ("saved_by", "message"),
    [
        ({}, "it was saved by an unknown older version, and this is roseinfer "),
        ({"version": "roseinfer 0.0.9"}, "it was saved by roseinfer 0.0.9, and this is roseinfer "),
        ({"version": version()}, ""),
    ],
)
def test_version_that_saved_a_trace_is_reported(
    saved_by: dict[str, str],
    message: str,
    tmp_path: Path,
    policy: ImportPolicy,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert replay(write(tmp_path, **saved_by), policy) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "it was saved" in line]
    assert bool(lines) == bool(message)
    assert all(line.startswith(message) for line in lines)


EXPLODES = {"example": {"spec": {}, "finite": True, "operations": [{"do": "Explode"}]}}
OTHER_FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "a later format": (
        {"format": 9, "version": "roseinfer 7.0"},
        f"trace format 9 is unknown to {version()}, which has format {FORMAT}; "
        "replay it with roseinfer 7.0, which saved it",
    ),
    "no format": ({"format": "new"}, f"trace format 'new' is unknown to {version()}, which has"),
    "an older format": (
        {"format": 0},
        "trace format 0 can no longer be read; replay it at abc123, the last commit that can",
    ),
    "an unknown operation": (
        {"version": "roseinfer 7.0", **EXPLODES},
        f"the operation 'Explode' is unknown to {version()}, which has format {FORMAT}; "
        "replay it with roseinfer 7.0, which saved it",
    ),
    "an old operation": (
        {"example": {"spec": {}, "finite": True, "operations": [{"do": "Tidy"}]}},
        "the operation 'Tidy' can no longer be read; replay it at def456, the last commit that can",
    ),
    "an old field of a request": (
        {
            "adapter": "pytest_roseinfer.targets.roseinfer_engine:RoseinferEngine",
            "check": "run_mix",
            "example": {"requests": [{"prompt": [1], "sampling": {}, "tides": 3}]},
        },
        "the field 'tides' of a request can no longer be read; replay it at fed987, the last",
    ),
}


@pytest.mark.parametrize("case", OTHER_FORMATS)
def test_unreadable_trace_names_the_version_that_reads_it(
    case: str, tmp_path: Path, policy: ImportPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "LAST_COMMITS", {0: "abc123", "Tidy": "def456", "tides": "fed987"})
    changed_fields, message = OTHER_FORMATS[case]
    with pytest.raises(TraceError) as error:
        replay(write(tmp_path, **changed_fields), policy)
    assert f"trace.json: {message}" in str(error.value)


def test_operations_of_the_adapters_file_are_read(tmp_path: Path, policy: ImportPolicy) -> None:
    lines = (
        "from pytest_roseinfer.capabilities.operation import Operation, register",
        "from tests.capabilities.caches.list_cache import ListCache as Cache",
        "@register('Own')",
        "class Own(Operation):",
        "    def describe(self) -> str:",
        "        return 'do nothing'",
        "    def drive(self, cache: object) -> None:",
        "        pass",
    )
    (policy.project / "own_operations.py").write_text("\n".join(lines))
    example = History(CacheSpec(), ()).to_json() | {"operations": [{"do": "Own"}]}
    target_fields = {"adapter": "own_operations:Cache", "folders": [str(policy.project)]}
    trusted = ImportPolicy(["own_operations:Cache"], policy.project)
    assert replay(write(tmp_path, example=example, **target_fields), trusted) == 0


class NegatesKeys(ListCache):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, -key, value)


class FailsToBegin(ListCache):
    def make(self, spec: CacheSpec) -> None:  # noqa: ARG002
        raise MemoryError(f"{object()} is too large")


WRONG = "peek: sequence 0, layer 0, K: position 0, head 0 (1 of 1 wrong): expected"
MEMORY = "MemoryError('<object object at 0x1> is too large')"


@pytest.mark.parametrize(
    ("cache", "recorded", "message"),
    [
        ("NegatesKeys", "accepted a write", "was recorded with 'accepted a write', and fails now"),
        ("NegatesKeys", "", f"it was recorded with '', and fails now with '{WRONG}"),
        ("NegatesKeys", None, ""),
        ("FailsToBegin", WRONG, f"it was recorded with '{WRONG}', and fails now with "),
        ("FailsToBegin", MEMORY, ""),
        ("ListCache", WRONG, f"it was recorded with: {WRONG}"),
    ],
)
def test_replay_reports_a_different_failure(
    cache: str,
    recorded: str | None,
    message: str,
    tmp_path: Path,
    policy: ImportPolicy,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trusted = ImportPolicy((), policy.project, trusted=True)
    target_fields = {} if recorded is None else {"failed": recorded}
    trace = write(tmp_path, adapter=f"{__name__}:{cache}", **target_fields)
    with pytest.raises(MemoryError) if cache == "FailsToBegin" else nullcontext():
        assert replay(trace, trusted) == (cache == "NegatesKeys")
    output = capsys.readouterr().out
    assert message in output
    assert ("it was recorded" in output) == bool(message)


def test_invalid_json_is_named_with_its_line(tmp_path: Path, policy: ImportPolicy) -> None:
    (tmp_path / "cut.json").write_text('{\n "adapter": "a:B",\n "fi')
    with pytest.raises(TraceError, match=r"cut\.json is not a trace: .*line 3"):
        replay(str(tmp_path / "cut.json"), policy)
