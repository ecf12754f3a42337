"""Timelines of an engine's failure: the stages of each request, and its first wrong token."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar
from xml.etree import ElementTree

import pytest

from pytest_roseinfer import MixDivergence, RequestMix, RequestSpec, Sampling, run_forks, run_mix
from pytest_roseinfer.engines.run import timeline_of
from pytest_roseinfer.findings.svg import draw_failure
from pytest_roseinfer.findings.timeline import describe_timeline, draw_timeline
from pytest_roseinfer.report.html import findings_html
from pytest_roseinfer.run import coverage
from pytest_roseinfer.search.recorder import record
from pytest_roseinfer.targets.roseinfer_engine import RoseinferEngine
from tests.engine_capabilities.engines.broken_engines import (
    ForksShareTheirDraws,
    ReturnsANeighboursToken,
)
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer import EngineAdapter
    from pytest_roseinfer.findings.timeline import FindingRecord, Timeline
    from tests.engine_capabilities.engines.toy_engine import ToyRequest

OPTIONS = {"batch_size": 2, "prefixes": False}
MIX = RequestMix(
    (
        RequestSpec((1, 2), Sampling(4, ignore_eos=True)),
        RequestSpec((3,), Sampling(3, ignore_eos=True), arrival=1),
        RequestSpec((4,), Sampling(6, ignore_eos=True), arrival=1, cancel_after=2),
    ),
    cache_tokens=10,
    options=OPTIONS,
)
"""A mix whose third request never finds room."""


class OffByOneLate(ToyEngine):
    """Changes the second token of the second request."""

    def take(self, request: ToyRequest, token: int) -> None:
        wrong = request.prompt == (3,) and len(request.tokens) == 1
        super().take(request, token ^ wrong)


class ReportsStages(ToyAdapter):
    engine_type: ClassVar[type[ToyEngine]] = OffByOneLate

    def stage(self, request: Any) -> str:
        return "decoding" if request in self.engine.running else "waiting"


class ReportsNoStages(ToyAdapter):
    engine_type: ClassVar[type[ToyEngine]] = OffByOneLate


def record_finding(
    adapter: type[ToyAdapter],
    mix: RequestMix = MIX,
    check: Callable[[type[EngineAdapter], RequestMix], object] = run_mix,
) -> tuple[FindingRecord, Timeline]:
    previous_coverage = coverage.current()
    coverage.set_current(coverage.Coverage())
    try:
        with pytest.raises(MixDivergence) as caught:
            check(adapter, mix)
        record(adapter, mix, check.__name__, caught.value, None)
        (finding,) = coverage.current().of(adapter).findings
    finally:
        coverage.set_current(previous_coverage)
    assert finding["timeline"]
    return finding, finding["timeline"]


def test_timeline_marks_the_first_wrong_token() -> None:
    _, timeline = record_finding(ReportsStages)
    first, second, third = timeline["requests"]
    assert (first["wrong"], second["wrong"], third["wrong"]) == (False, True, False)
    assert second["diverged_at"] == 1
    assert second["actual"][:1] == second["expected"][:1]
    assert second["actual"][1] != second["expected"][1]
    step = second["diverged_step"]
    assert step is not None
    assert (second["tokens"][step - 1], second["tokens"][step]) == (1, 2)
    assert first["diverged_at"] is third["diverged_at"] is None


def test_stages_come_from_the_adapter_or_from_observation() -> None:
    with_stages, without_stages = (
        record_finding(adapter)[1]["requests"] for adapter in (ReportsStages, ReportsNoStages)
    )
    assert [line["stages"][0] for line in with_stages] == ["arrived", "", ""]
    assert "waiting" in {stage for line in with_stages for stage in line["stages"]}
    stages = {stage for line in without_stages for stage in line["stages"]}
    assert stages <= {"", "arrived", "decoding", "cancelled", "ended"}
    assert "cancelled" in {*with_stages[2]["stages"], *without_stages[2]["stages"]}


def test_timeline_of_a_request_stops_at_its_end() -> None:
    class EndsLate(ReportsNoStages):
        def is_finished(self, request: Any) -> bool:
            ended: bool = request.ended
            return ended

    _, timeline = record_finding(EndsLate)
    for line in timeline["requests"]:
        ends = [at for at, stage in enumerate(line["stages"]) if stage in ("ended", "cancelled")]
        assert all(stage == "" for at in ends for stage in line["stages"][at + 1 :])


def test_shrunk_mix_has_a_timeline() -> None:
    """The bug needs a mix of two requests."""
    two_requests = RequestMix(MIX.requests[:2], options=OPTIONS)
    finding, timeline = record_finding(ReturnsANeighboursToken, two_requests)
    assert "alone it gets" in finding["summary"]
    assert any(line["wrong"] for line in timeline["requests"])


def test_timeline_of_forks_shows_expected_tokens() -> None:
    sampling = Sampling(4, ignore_eos=True, temperature=1.0, seed=3)
    requests = (RequestSpec((1, 2), sampling), RequestSpec((1, 2), replace(sampling, seed=4)))
    forks = RequestMix(requests, options=OPTIONS)
    finding, timeline = record_finding(ForksShareTheirDraws, forks, run_forks)
    assert finding["summary"].startswith("fork 1")
    first, second = timeline["requests"]
    assert (first["wrong"], second["wrong"]) == (False, True)
    assert first["actual"] == first["expected"]
    assert second["actual"] != second["expected"]
    assert second["diverged_step"] == 1
    assert "fork 1 of request 0" in draw_timeline(timeline).marks


def test_timeline_is_drawn_with_the_wrong_token_marked() -> None:
    finding, timeline = record_finding(ReportsStages)
    ElementTree.fromstring(draw_timeline(timeline).as_image(describe_timeline(timeline)))
    marks = draw_timeline(timeline).marks
    assert marks.count('class="wrong"') == 2  # at the step and among the tokens
    assert ">request 1</text>" in marks
    assert "token 1 differs from alone at step" in describe_timeline(timeline)
    ElementTree.fromstring(draw_failure(finding))
    assert "request 2: at step 1: 1 token [4]" in draw_failure(finding)
    assert describe_timeline(timeline) in findings_html([finding], {})


def test_roseinfer_reports_waiting_prefilling_and_preempted_stages() -> None:
    defaults = {name: values[0] for name, values in RoseinferEngine.option_choices.items()}
    options = {**defaults, "prefix_cache": False, "prefill_max_tokens": 3, "max_batch_size": 2}
    long_sampling, short_sampling = Sampling(9, ignore_eos=True), Sampling(8, ignore_eos=True)
    requests = (
        RequestSpec(tuple(range(1, 8)), long_sampling),
        RequestSpec((8, 9, 10), short_sampling),
        RequestSpec((11,), short_sampling),
    )
    mix = RequestMix(requests, cache_tokens=20, options=options)
    lines = timeline_of(RoseinferEngine, mix)["requests"]
    stages = [[stage for stage, _ in groupby(filter(None, line["stages"]))] for line in lines]
    assert stages[0] == ["arrived", "prefilling", "decoding", "ended"]
    after_preemption = ["preempted", "prefilling", "decoding", "ended"]
    assert stages[1] == ["arrived", "waiting", "decoding", *after_preemption]
    assert stages[2] == ["arrived", "waiting", "decoding", "ended"]
    assert not any(line["wrong"] for line in lines)
