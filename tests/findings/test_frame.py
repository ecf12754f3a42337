"""A finding is recorded with a frame for each step: what the cache's books and blocks showed."""

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
from tests.findings.recorded_findings import FORKED, NeverCopies, of_never_copies, recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.findings.frame import BlockView, Frame, SequenceView
    from pytest_roseinfer.findings.timeline import FindingRecord


def row(frame: Frame, name: int) -> SequenceView:
    (found,) = (each for each in frame["sequences"] if each["name"] == name)
    return found


def block(frame: Frame, number: int) -> BlockView:
    (found,) = (each for each in frame["blocks"] if each["number"] == number)
    return found


def test_frames_show_who_holds_what_before_and_after_each_step() -> None:
    frames = of_never_copies()["frames"]
    assert [frame["step"] for frame in frames] == [0, 1, 2, 3, 4, 5]
    assert [frame["words"] for frame in frames[1:]] == [step.describe() for step in FORKED]
    assert frames[0]["sequences"] == []
    assert {tuple(each["states"]) for each in frames[0]["blocks"]} == {("free", "poisoned")}
    (first,) = row(frames[1], 0)["blocks"] or [None]
    assert first is not None
    assert block(frames[2], first)["states"] == ["held"]
    assert row(frames[3], 3)["blocks"] == [first]
    assert block(frames[3], first) == {
        "number": first,
        "states": ["shared"],
        "refcount": 2,
        "holders": [0, 3],
        "marked": False,
    }


def test_a_refused_step_says_so_and_shows_that_nothing_changed() -> None:
    frames = of_never_copies()["frames"]
    assert frames[4]["refused"] == "refused: no room (3 blocks needed, 2 free)"
    assert frames[4]["blocks"] == frames[3]["blocks"]
    assert frames[4]["sequences"] == frames[3]["sequences"]


def test_the_wrong_token_is_marked_in_the_last_frame_alone() -> None:
    found = of_never_copies()
    *before, last = found["frames"]
    wrong = row(last, 0)["wrong"]
    assert [(each["position"], each["found"]) for each in wrong] == [(1, "3.1")]
    assert "expected sequence 0, token 1" in wrong[0]["words"]
    assert (found["expected"], found["found"]) == (
        "sequence 0, token 1",
        "sequence 3, token 1",
    )
    assert not any(each["wrong"] or each["marked"] for one in before for each in one["sequences"])
    assert not row(last, 3)["wrong"]


def test_a_step_that_raised_has_a_frame_too() -> None:
    frames = recorded(LosesTheBlock, (Append((0,)), Free(0)))["frames"]
    assert [frame["words"] for frame in frames[1:]] == [Append((0,)).describe(), Free(0).describe()]


def test_a_cache_without_books_shows_its_tokens() -> None:
    class Negates(ListCache):
        def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
            super().append(seqs, -key, value)

    _, last = recorded(Negates, (Append((0,)),))["frames"]
    assert row(last, 0)["blocks"] is None
    assert row(last, 0)["wrong"][0]["found"] == "?"
    assert last["blocks"] == []


class AcceptsAnything(NeverCopies):
    def bad_calls(self) -> list[BadCall]:
        return [BadCall("a call that is wrong", lambda: None, (ValueError,))]


def test_a_bad_call_has_a_frame_of_its_own() -> None:
    frames = recorded(AcceptsAnything, (Append((0,)),))["frames"]
    assert [frame["words"] for frame in frames[1:]] == [Append((0,)).describe(), BAD_CALL]


def test_a_run_that_differs_from_another_ends_with_its_last_step() -> None:
    found = recorded(FillsFromTheEnd, (Append((0,)),), check="check_every_option")
    assert [frame["step"] for frame in found["frames"]] == [0, 1]
    assert "differs from the run without" in found["what"]


def all_recorded(adapter: type[KVCacheAdapter], error: BaseException) -> list[FindingRecord]:
    seen = coverage.current()
    coverage.set_current(coverage.Coverage())
    try:
        record(adapter, History(CacheSpec(), (Append((0,)),)), "run_history", error, None)
        return coverage.current().of(adapter).found
    finally:
        coverage.set_current(seen)


def recorded_error(adapter: type[KVCacheAdapter], error: Exception) -> FindingRecord:
    (found,) = all_recorded(adapter, error)
    return found


def test_a_search_that_was_interrupted_found_nothing() -> None:
    assert all_recorded(NeverCopies, KeyboardInterrupt()) == []


def test_a_cache_that_cannot_be_asked_is_drawn_without_its_books() -> None:
    found = recorded_error(HasNoBooks, RuntimeError("books are gone"))
    assert row(found["frames"][-1], 0)["blocks"] == [0]
    assert block(found["frames"][-1], 0)["refcount"] is None
    assert found["what"] == "RuntimeError('books are gone')"
    assert "1. append one token to sequence 0" in found["message"]


def test_a_cache_that_cannot_be_made_is_not_drawn() -> None:
    class NeverMade(NeverCopies):
        def make(self, spec: CacheSpec) -> None:
            raise RuntimeError(spec)

    assert recorded_error(NeverMade, RuntimeError("no memory"))["frames"] == []


def test_a_step_that_hangs_is_not_run_again() -> None:
    error = Difference("the step hangs", lambda: "")
    assert recorded_error(NeverCopies, error)["frames"]
    error.__cause__ = StepHung("did not return")
    assert recorded_error(NeverCopies, error)["frames"] == []
    assert CURRENT_EXAMPLE.began is None


def test_a_finding_is_told_once_though_three_tests_met_it() -> None:
    target = coverage.TargetCoverage({}, [])
    one = of_never_copies()
    for test in ("a", "b", "a"):
        target.note_found({**one, "tests": [test]})
    other = coverage.TargetCoverage({}, [])
    other.note_found({**one, "what": "worded otherwise", "tests": ["c"]})
    other.note_found({**one, "what": "another", "example": {}, "tests": ["d"]})
    # As it comes from a worker of pytest-xdist.
    target.add(json.loads(json.dumps(other.to_json())))
    assert [found["tests"] for found in target.found] == [["a", "b", "c"], ["d"]]
    assert target.found[1]["frames"] == one["frames"]
