"""A trace may come from anybody: what it has imported is what this run names itself."""

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
EVIL = "raise SystemExit('it was imported')"


def write(folder: Path, **changed: Any) -> str:
    """Write a trace of one append to a shipped cache, with other fields as they are given."""
    trace = {
        "adapter": SHIPPED,
        "file": "",
        "folders": [],
        "environment": {},
        "check": "run_history",
        "example": History(CacheSpec(), (Append((0,)),)).to_json(),
    }
    file = folder / "trace.json"
    file.write_text(json.dumps({**trace, **changed}))
    return str(file)


@pytest.fixture
def allowed(tmp_path: Path) -> ImportPolicy:
    (tmp_path / "project").mkdir()
    return ImportPolicy(targets={"named:Cache"}, project=tmp_path / "project")


def test_an_adapter_that_the_run_does_not_name_is_not_imported(
    tmp_path: Path, allowed: ImportPolicy
) -> None:
    (tmp_path / "evil.py").write_text(EVIL)
    evil = {"adapter": "evil:Cache", "file": str(tmp_path / "evil.py")}
    with pytest.raises(TraceError, match=r"--roseinfer-target evil:Cache .* --roseinfer-rep"):
        replay(write(tmp_path, **evil), allowed)
    with pytest.raises(SystemExit):
        replay(write(tmp_path, **evil), ImportPolicy((), tmp_path / "project", trusted=True))


def test_a_file_outside_of_the_project_is_not_imported_under_a_name_that_is_allowed(
    tmp_path: Path, allowed: ImportPolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    outside, inside = tmp_path / "evil.py", allowed.project / "mine.py"
    outside.write_text(EVIL)
    inside.write_text("")
    assert replay(write(tmp_path, file=str(outside), folders=[str(tmp_path)]), allowed) == 0
    assert "importing it\n" in capsys.readouterr().out
    named = {"adapter": "named:Cache", "folders": [str(tmp_path), str(allowed.project)]}
    assert allowed.file({**named, "file": str(outside)}) == ""
    assert allowed.file({**named, "file": str(inside)}) == str(inside)
    assert allowed.folders(named) == [str(allowed.project)]


def test_it_sets_no_variable_and_says_which_were_set(
    tmp_path: Path,
    allowed: ImportPolicy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TRITON_DEBUG", raising=False)
    replay(write(tmp_path, environment={"TRITON_DEBUG": "1"}), allowed)
    said = capsys.readouterr().out
    assert "TRITON_DEBUG was '1' when this was saved, and is 'not set' here" in said
    assert "TRITON_DEBUG" not in os.environ


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "a path for a list": ({"folders": "src"}, "trace.json is not a trace: folders must be a list"),
    "numbers": ({"environment": {"X": 1}}, "environment must hold strings"),
    "a list for an example": ({"example": []}, "example must be a dict"),
    "an unknown check": ({"check": "os.system"}, "unknown check os.system"),
    "no words": ({"failed": 1}, "trace.json is not a trace: failed must be a str"),
    "no operations": ({"example": {"spec": {}}}, "its example is invalid: KeyError: 'operations'"),
    "a step of no kind": (
        {"example": {"spec": {}, "finite": True, "operations": [{}]}},
        "its example is invalid: KeyError: 'do'",
    ),
    "no step": (
        {"example": {"spec": {}, "finite": True, "operations": [1]}},
        "its example is invalid: ",
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_is_said_with_its_place(
    what: str, tmp_path: Path, allowed: ImportPolicy
) -> None:
    changed, said = MALFORMED[what]
    with pytest.raises(TraceError) as refused:
        replay(write(tmp_path, **changed), allowed)
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path / "trace.json"))


def test_paths_begin_at_the_root_of_the_project(tmp_path: Path, allowed: ImportPolicy) -> None:
    here = str(allowed.project)
    named = {"adapter": "named:Cache", "file": "tests/mine.py", "folders": ["tests", "..", here]}
    assert allowed.file(named) == f"{here}/tests/mine.py"
    assert allowed.folders(named) == [f"{here}/tests", here]
    trusting = ImportPolicy((), allowed.project, trusted=True)
    assert trusting.folders(named) == [f"{here}/tests", str(tmp_path), here]


@pytest.mark.parametrize(
    ("saved_by", "said"),
    [
        ({}, "it was saved by an unknown older version, and this is roseinfer "),
        ({"version": "roseinfer 0.0.9"}, "it was saved by roseinfer 0.0.9, and this is roseinfer "),
        ({"version": version()}, ""),
    ],
)
def test_a_trace_of_another_version_says_so(
    saved_by: dict[str, str],
    said: str,
    tmp_path: Path,
    allowed: ImportPolicy,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert replay(write(tmp_path, **saved_by), allowed) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if "it was saved" in line]
    assert bool(found) == bool(said)
    assert all(line.startswith(said) for line in found)


EXPLODES = {"example": {"spec": {}, "finite": True, "operations": [{"do": "Explode"}]}}
OF_ANOTHER: dict[str, tuple[dict[str, Any], str]] = {
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
    "an operation of old": (
        {"example": {"spec": {}, "finite": True, "operations": [{"do": "Tidy"}]}},
        "the operation 'Tidy' can no longer be read; replay it at def456, the last commit that can",
    ),
    "a field of a request of old": (
        {
            "adapter": "pytest_roseinfer.targets.roseinfer_engine:RoseinferEngine",
            "check": "run_mix",
            "example": {"requests": [{"prompt": [1], "sampling": {}, "tides": 3}]},
        },
        "the field 'tides' of a request can no longer be read; replay it at fed987, the last",
    ),
}


@pytest.mark.parametrize("what", OF_ANOTHER)
def test_a_trace_that_this_version_cannot_read_says_which_can(
    what: str, tmp_path: Path, allowed: ImportPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "LAST_COMMITS", {0: "abc123", "Tidy": "def456", "tides": "fed987"})
    changed, said = OF_ANOTHER[what]
    with pytest.raises(TraceError) as refused:
        replay(write(tmp_path, **changed), allowed)
    assert f"trace.json: {said}" in str(refused.value)


def test_operations_of_the_adapters_own_file_are_known(
    tmp_path: Path, allowed: ImportPolicy
) -> None:
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
    (allowed.project / "own_operations.py").write_text("\n".join(lines))
    example = History(CacheSpec(), ()).to_json() | {"operations": [{"do": "Own"}]}
    named = {"adapter": "own_operations:Cache", "folders": [str(allowed.project)]}
    trusted = ImportPolicy(["own_operations:Cache"], allowed.project)
    assert replay(write(tmp_path, example=example, **named), trusted) == 0


class NegatesKeys(ListCache):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, -key, value)


class FailsToBegin(ListCache):
    def make(self, spec: CacheSpec) -> None:  # noqa: ARG002
        raise MemoryError(f"{object()} is too large")


WRONG = "peek: sequence 0, layer 0, K: position 0, head 0 (1 of 1 wrong): expected"
MEMORY = "MemoryError('<object object at 0x1> is too large')"


@pytest.mark.parametrize(
    ("cache", "recorded", "said"),
    [
        ("NegatesKeys", "accepted a write", "was recorded with 'accepted a write', and fails now"),
        ("NegatesKeys", "", f"it was recorded with '', and fails now with '{WRONG}"),
        ("NegatesKeys", None, ""),
        ("FailsToBegin", WRONG, f"it was recorded with '{WRONG}', and fails now with "),
        ("FailsToBegin", MEMORY, ""),
        ("ListCache", WRONG, f"it was recorded with: {WRONG}"),
    ],
)
def test_what_fails_otherwise_than_it_was_recorded_says_so(
    cache: str,
    recorded: str | None,
    said: str,
    tmp_path: Path,
    allowed: ImportPolicy,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trusting = ImportPolicy((), allowed.project, trusted=True)
    named = {} if recorded is None else {"failed": recorded}
    trace = write(tmp_path, adapter=f"{__name__}:{cache}", **named)
    with pytest.raises(MemoryError) if cache == "FailsToBegin" else nullcontext():
        assert replay(trace, trusting) == (cache == "NegatesKeys")
    shown = capsys.readouterr().out
    assert said in shown
    assert ("it was recorded" in shown) == bool(said)


def test_a_line_that_is_no_json_is_named(tmp_path: Path, allowed: ImportPolicy) -> None:
    (tmp_path / "cut.json").write_text('{\n "adapter": "a:B",\n "fi')
    with pytest.raises(TraceError, match=r"cut\.json is not a trace: .*line 3"):
        replay(str(tmp_path / "cut.json"), allowed)
