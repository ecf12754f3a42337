"""A timeline of an engine's failure shows what became of each request, and where one parted."""

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
    ANeighboursTokenLeaksIn,
    ForksShareTheirDraws,
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
"""The third finds no room for as long as it is there."""


class OffByOneLate(ToyEngine):
    """The third token of the second request is another one."""

    def take(self, request: ToyRequest, token: int) -> None:
        wrong = request.prompt == (3,) and len(request.tokens) == 1
        super().take(request, token ^ wrong)


class TellsStages(ToyAdapter):
    engine_type: ClassVar[type[ToyEngine]] = OffByOneLate

    def stage(self, request: Any) -> str:
        return "decoding" if request in self.engine.running else "waiting"


class TellsNone(ToyAdapter):
    engine_type: ClassVar[type[ToyEngine]] = OffByOneLate


def recorded(
    adapter: type[ToyAdapter],
    mix: RequestMix = MIX,
    check: Callable[[type[EngineAdapter], RequestMix], object] = run_mix,
) -> tuple[FindingRecord, Timeline]:
    seen = coverage.current()
    coverage.set_current(coverage.Coverage())
    try:
        with pytest.raises(MixDivergence) as caught:
            check(adapter, mix)
        record(adapter, mix, check.__name__, caught.value, None)
        (found,) = coverage.current().of(adapter).found
    finally:
        coverage.set_current(seen)
    assert found["timeline"]
    return found, found["timeline"]


def test_it_shows_where_a_request_got_another_token() -> None:
    _, timeline = recorded(TellsStages)
    first, second, third = timeline["requests"]
    assert (first["wrong"], second["wrong"], third["wrong"]) == (False, True, False)
    assert second["parted"] == 1
    assert second["found"][:1] == second["expected"][:1]
    assert second["found"][1] != second["expected"][1]
    step = second["parted_step"]
    assert step is not None
    assert (second["tokens"][step - 1], second["tokens"][step]) == (1, 2)
    assert first["parted"] is third["parted"] is None


def test_a_stage_is_what_the_adapter_says_or_what_can_be_seen() -> None:
    told, seen = (recorded(adapter)[1]["requests"] for adapter in (TellsStages, TellsNone))
    assert [line["stages"][0] for line in told] == ["arrived", "", ""]
    assert "waiting" in {stage for line in told for stage in line["stages"]}
    stages = {stage for line in seen for stage in line["stages"]}
    assert stages <= {"", "arrived", "decoding", "cancelled", "ended"}
    assert "cancelled" in {*told[2]["stages"], *seen[2]["stages"]}


def test_a_request_is_shown_until_it_ends() -> None:
    class EndsLate(TellsNone):
        def is_finished(self, request: Any) -> bool:
            over: bool = request.over
            return over

    _, timeline = recorded(EndsLate)
    for line in timeline["requests"]:
        over = [at for at, stage in enumerate(line["stages"]) if stage in ("ended", "cancelled")]
        assert all(stage == "" for at in over for stage in line["stages"][at + 1 :])


def test_a_mix_that_shrank_under_a_search_is_drawn_too() -> None:
    """What leaks from a neighbour shows in a mix of two."""
    two = RequestMix(MIX.requests[:2], options=OPTIONS)
    found, timeline = recorded(ANeighboursTokenLeaksIn, two)
    assert "alone it gets" in found["what"]
    assert any(line["wrong"] for line in timeline["requests"])


def test_forks_are_drawn_beside_what_they_get_alone() -> None:
    drawn = Sampling(4, ignore_eos=True, temperature=1.0, seed=3)
    both = (RequestSpec((1, 2), drawn), RequestSpec((1, 2), replace(drawn, seed=4)))
    forks = RequestMix(both, options=OPTIONS)
    found, timeline = recorded(ForksShareTheirDraws, forks, run_forks)
    assert found["what"].startswith("fork 1")
    first, second = timeline["requests"]
    assert (first["wrong"], second["wrong"]) == (False, True)
    assert first["found"] == first["expected"]
    assert second["found"] != second["expected"]
    assert second["parted_step"] == 1
    assert "fork 1 of request 0" in draw_timeline(timeline).marks


def test_it_is_drawn_with_the_parted_token_marked() -> None:
    found, timeline = recorded(TellsStages)
    ElementTree.fromstring(draw_timeline(timeline).as_image(describe_timeline(timeline)))
    marks = draw_timeline(timeline).marks
    assert marks.count('class="wrong"') == 2  # at the step, and among the tokens
    assert ">request 1</text>" in marks
    assert "token 1 differs from alone at step" in describe_timeline(timeline)
    ElementTree.fromstring(draw_failure(found))
    assert "request 2: at step 1: 1 token [4]" in draw_failure(found)
    assert describe_timeline(timeline) in findings_html([found], {})


def test_our_engine_says_who_waits_is_prefilled_and_is_preempted() -> None:
    usual = {name: values[0] for name, values in RoseinferEngine.option_choices.items()}
    options = {**usual, "prefix_cache": False, "prefill_max_tokens": 3, "max_batch_size": 2}
    long, short = Sampling(9, ignore_eos=True), Sampling(8, ignore_eos=True)
    requests = (
        RequestSpec(tuple(range(1, 8)), long),
        RequestSpec((8, 9, 10), short),
        RequestSpec((11,), short),
    )
    mix = RequestMix(requests, cache_tokens=20, options=options)
    lines = timeline_of(RoseinferEngine, mix)["requests"]
    stages = [[stage for stage, _ in groupby(filter(None, line["stages"]))] for line in lines]
    assert stages[0] == ["arrived", "prefilling", "decoding", "ended"]
    again = ["preempted", "prefilling", "decoding", "ended"]
    assert stages[1] == ["arrived", "waiting", "decoding", *again]
    assert stages[2] == ["arrived", "waiting", "decoding", "ended"]
    assert not any(line["wrong"] for line in lines)
