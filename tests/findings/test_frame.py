"""Frames of a finding: each step's view of the cache's books and blocks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pytest_roseinfer import BadCall, CacheSpec, History
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.frames import BAD_CALL
from pytest_roseinfer.run.watchdog import CURRENT_EXAMPLE, StepHung
from pytest_roseinfer.search.recorder import record
from tests.capabilities.caches.broken_caches import FillsFromTheEnd, HasNoBooks, LosesTheBlock
from tests.capabilities.caches.list_cache import ListCache
from tests.findings.recorded_findings import (
    FORKED,
    NeverCopies,
    finding_of_never_copies,
    record_finding,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.findings.frame import BlockView, Frame, SequenceView
    from pytest_roseinfer.findings.timeline import FindingRecord


def sequence_view(frame: Frame, name: int) -> SequenceView:
    (view,) = (each for each in frame["sequences"] if each["name"] == name)
    return view


def block_view(frame: Frame, number: int) -> BlockView:
    (view,) = (each for each in frame["blocks"] if each["number"] == number)
    return view


def test_frames_show_holders_before_and_after_each_step() -> None:
    frames = finding_of_never_copies()["frames"]
    assert [frame["step"] for frame in frames] == [0, 1, 2, 3, 4, 5]
    assert [frame["description"] for frame in frames[1:]] == [step.describe() for step in FORKED]
    assert frames[0]["sequences"] == []
    assert {tuple(each["states"]) for each in frames[0]["blocks"]} == {("free", "poisoned")}
    (first,) = sequence_view(frames[1], 0)["blocks"] or [None]
    assert first is not None
    assert block_view(frames[2], first)["states"] == ["held"]
    assert sequence_view(frames[3], 3)["blocks"] == [first]
    assert block_view(frames[3], first) == {
        "number": first,
        "states": ["shared"],
        "refcount": 2,
        "holders": [0, 3],
        "marked": False,
    }


def test_frame_of_a_refused_step_shows_no_change() -> None:
    frames = finding_of_never_copies()["frames"]
    assert frames[4]["refused"] == "refused: no room (3 blocks needed, 2 free)"
    assert frames[4]["blocks"] == frames[3]["blocks"]
    assert frames[4]["sequences"] == frames[3]["sequences"]


def test_wrong_token_is_marked_in_the_last_frame_only() -> None:
    finding = finding_of_never_copies()
    *earlier, last = finding["frames"]
    wrong = sequence_view(last, 0)["wrong"]
    assert [(each["position"], each["actual"]) for each in wrong] == [(1, "3.1")]
    assert "expected sequence 0, token 1" in wrong[0]["description"]
    assert (finding["expected"], finding["actual"]) == (
        "sequence 0, token 1",
        "sequence 3, token 1",
    )
    assert not any(
        each["wrong"] or each["marked"] for frame in earlier for each in frame["sequences"]
    )
    assert not sequence_view(last, 3)["wrong"]


def test_step_that_raised_an_error_has_a_frame() -> None:
    frames = record_finding(LosesTheBlock, (Append((0,)), Free(0)))["frames"]
    assert [frame["description"] for frame in frames[1:]] == [
        Append((0,)).describe(),
        Free(0).describe(),
    ]


def test_frame_of_a_cache_without_books_shows_tokens() -> None:
    class Negates(ListCache):
        def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
            super().append(seqs, -key, value)

    _, last = record_finding(Negates, (Append((0,)),))["frames"]
    assert sequence_view(last, 0)["blocks"] is None
    assert sequence_view(last, 0)["wrong"][0]["actual"] == "?"
    assert last["blocks"] == []


class AcceptsAnything(NeverCopies):
    def bad_calls(self) -> list[BadCall]:
        return [BadCall("a wrong call", lambda: None, (ValueError,))]


def test_bad_call_has_its_own_frame() -> None:
    frames = record_finding(AcceptsAnything, (Append((0,)),))["frames"]
    assert [frame["description"] for frame in frames[1:]] == [Append((0,)).describe(), BAD_CALL]


def test_frames_of_a_differing_run_end_with_its_last_step() -> None:
    finding = record_finding(FillsFromTheEnd, (Append((0,)),), check="check_every_option")
    assert [frame["step"] for frame in finding["frames"]] == [0, 1]
    assert "differs from the run without" in finding["summary"]


def record_findings(adapter: type[KVCacheAdapter], error: BaseException) -> list[FindingRecord]:
    previous_coverage = coverage.current()
    coverage.set_current(coverage.Coverage())
    try:
        record(adapter, History(CacheSpec(), (Append((0,)),)), "run_history", error, None)
        return coverage.current().of(adapter).findings
    finally:
        coverage.set_current(previous_coverage)


def record_error(adapter: type[KVCacheAdapter], error: Exception) -> FindingRecord:
    (finding,) = record_findings(adapter, error)
    return finding


def test_interrupted_search_has_no_finding() -> None:
    assert record_findings(NeverCopies, KeyboardInterrupt()) == []


def test_frame_of_a_cache_with_failing_books_shows_expected_blocks() -> None:
    finding = record_error(HasNoBooks, RuntimeError("books are gone"))
    assert sequence_view(finding["frames"][-1], 0)["blocks"] == [0]
    assert block_view(finding["frames"][-1], 0)["refcount"] is None
    assert finding["summary"] == "RuntimeError('books are gone')"
    assert "1. append one token to sequence 0" in finding["message"]


def test_cache_that_cannot_be_built_has_no_frames() -> None:
    class NeverMade(NeverCopies):
        def make(self, spec: CacheSpec) -> None:
            raise RuntimeError(spec)

    assert record_error(NeverMade, RuntimeError("no memory"))["frames"] == []


def test_hanging_step_is_not_repeated_for_frames() -> None:
    error = Difference("the step hangs", lambda: "")
    assert record_error(NeverCopies, error)["frames"]
    error.__cause__ = StepHung("did not return")
    assert record_error(NeverCopies, error)["frames"] == []
    assert CURRENT_EXAMPLE.step_began_at is None


def test_equal_findings_of_several_tests_are_merged() -> None:
    target = coverage.TargetCoverage({}, [])
    finding = finding_of_never_copies()
    for test in ("a", "b", "a"):
        target.add_finding({**finding, "tests": [test]})
    other_target = coverage.TargetCoverage({}, [])
    other_target.add_finding({**finding, "summary": "worded otherwise", "tests": ["c"]})
    other_target.add_finding({**finding, "summary": "another", "example": {}, "tests": ["d"]})
    # As a worker of pytest-xdist sends it.
    target.add(json.loads(json.dumps(other_target.to_json())))
    assert [merged["tests"] for merged in target.findings] == [["a", "b", "c"], ["d"]]
    assert target.findings[1]["frames"] == finding["frames"]
