"""Wide mixes, which have many requests at a time: their requests, and bugs that they find."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import MixDivergence, conformance, settings
from pytest_roseinfer.engines.strategies import REQUESTS, wide_mix, wide_settings
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run.coverage import current
from pytest_roseinfer.search import shrink
from pytest_roseinfer.suite import large_search
from pytest_roseinfer.suite.engine_tests import WideMixes
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine
from tests.fresh_run import fresh_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.engine_capabilities.engines.toy_engine import ToyRequest


class Wide(ToyAdapter):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "batch_size": (2, 8, 100),
        "prefixes": (False, True),
    }


class WrongRow(ToyEngine):
    """Takes the token of the previous row for the last of ``rows`` rows."""

    rows = 0

    def choose(self, batch: Sequence[ToyRequest]) -> list[int]:
        tokens = super().choose(batch)
        if len(tokens) >= self.rows:
            tokens[self.rows - 1] = tokens[self.rows - 2]
        return tokens


def wrong_from(rows: int) -> type[Wide]:
    engine = type("WrongFrom", (WrongRow,), {"rows": rows})
    return type("WrongFromRow", (Wide,), {"engine_type": engine})


class Slots(ToyEngine):
    def submit(self, *arguments: Any) -> ToyRequest:
        if len(self.waiting) + len(self.running) == 16:
            raise IndexError("no slot left")
        return super().submit(*arguments)


class HasSlots(Wide):
    engine_type = Slots


class DeclaresItsSlots(HasSlots):
    max_requests = 16


@pytest.fixture(autouse=True)
def _profile_dev(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shrink, "SHRINK_SECONDS", 2.0)
    with fresh_run(settings.Settings(examples=20, seed=1, failures_dir=None)):
        yield


def search(adapter: type[ToyAdapter]) -> None:
    tests: Any = conformance(adapter)()
    tests.test_requests_get_what_they_get_alone()


def test_right_engine_passes_and_the_largest_sizes_are_reported() -> None:
    search(Wide)
    target = current().of(Wide)
    assert TargetVerdict(target).sizes == "largest: 35 rows, 47 tokens"
    assert target.histories == 33  # without the wide mixes


def test_reported_rows_are_those_of_a_batch() -> None:
    class Narrow(Wide):
        option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
            **Wide.option_choices,
            "batch_size": (2, 8),
        }

    search(Narrow)
    assert TargetVerdict(current().of(Narrow)).sizes == "largest: 8 rows, 48 tokens"


@pytest.mark.sampled_cases
@pytest.mark.parametrize("rows", [8, 9, 20, 35])
def test_bug_in_a_row_of_wide_batches_is_found(rows: int) -> None:
    with pytest.raises(MixDivergence) as caught:
        search(wrong_from(rows))
    assert "alone it gets" in caught.value.summary
    assert rows <= len(caught.value.mix.requests) <= rows + 1


@pytest.mark.slow
def test_refused_wide_mix_suggests_declaring_most_requests() -> None:
    with pytest.raises(Difference) as caught:
        search(HasSlots)
    assert caught.value.summary == "request 16 was refused: IndexError: no slot left"
    (hint,) = (
        each for each in caught.value.extra_paragraphs if each.startswith("This is a wide mix")
    )
    assert "If HasSlots does not support that, declare its maximum: max_requests" in hint


def test_wide_mix_keeps_to_most_requests() -> None:
    search(DeclaresItsSlots)
    assert TargetVerdict(current().of(DeclaresItsSlots)).sizes == "largest: 16 rows, 47 tokens"


def test_wide_mixes_of_a_slow_engine_are_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    class Slow(ToyEngine):
        def step(self) -> None:
            now[0] += 0.1 * (len(self.waiting) + len(self.running) > 6)
            super().step()

    class SlowAdapter(Wide):
        engine_type = Slow

    monkeypatch.setattr(large_search, "monotonic", lambda: now[0])
    monkeypatch.setattr(WideMixes, "seconds", 0.6)
    search(SlowAdapter)
    sizes = TargetVerdict(current().of(SlowAdapter)).sizes
    assert sizes.endswith("(wide mixes cut short: 2, for lack of time)")


def test_leak_after_a_wide_mix_is_found() -> None:
    class LeaksInWideBatches(ToyEngine):
        def step(self) -> None:
            super().step()
            self.leases += len(self.running) > 20

    class Leaks(Wide):
        engine_type = LeaksInWideBatches

    with pytest.raises(MixDivergence, match="every request has ended, and the engine still holds"):
        search(Leaks)


@pytest.mark.parametrize("limit", [None, 6, 20])
@pytest.mark.parametrize("tokens", [3, 8, 48])
def test_requests_of_wide_mixes_keep_to_the_limits(tokens: int, limit: int | None) -> None:
    class Bounded(Wide):
        max_tokens = tokens
        max_requests = limit

    mix = wide_mix(Bounded, {}, "cpu")
    assert mix.size == (limit or REQUESTS)
    assert all(each.prompt and each.max_tokens <= tokens for each in mix.requests)
    assert all(0 <= token < 32 for each in mix.requests for token in each.prompt)
    if tokens == 48:
        assert len({each.prompt for each in mix.requests}) == mix.size


def test_wide_settings_have_every_value_and_most_pairs() -> None:
    choices = dict.fromkeys("ab", "wx") | {"c": "xyz", "d": "uvwxyz", "rows": (4, 40, 8)}
    all_settings = wide_settings(choices)
    assert all_settings[0] == {"a": "w", "b": "w", "c": "x", "d": "u", "rows": 40}
    assert len(all_settings) == 6
    for name in "abcd":
        assert {each[name] for each in all_settings} == {*choices[name]}
    assert {each["rows"] for each in all_settings} == {40}
    for first, second in combinations("abc", 2):
        assert len({(each[first], each[second]) for each in all_settings}) >= 4


def test_wide_settings_maximise_numbers_only() -> None:
    choices = {"kernels": (False, True), "ahead": (None, 3), "rows": (4,)}
    assert wide_settings(choices) == [
        {"kernels": False, "ahead": None, "rows": 4},
        {"kernels": True, "ahead": 3, "rows": 4},
    ]
    assert wide_settings({}) == [{}]


def test_other_bounds_do_not_prevent_a_wide_batch() -> None:
    class Bounded(ToyEngine):
        def __init__(self, *, tokens: int, **options: Any) -> None:
            super().__init__(**options)
            self.batch_size = min(self.batch_size, tokens)

    class TwoBounds(Wide):
        engine_type = Bounded
        option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
            **Wide.option_choices,
            "tokens": (64, 1, 3),
        }

    search(TwoBounds)
    assert TargetVerdict(current().of(TwoBounds)).sizes == "largest: 35 rows, 48 tokens"


@pytest.mark.parametrize("limit", [5, "many"])
def test_invalid_most_requests_is_refused(limit: object) -> None:
    adapter = type("Bounded", (Wide,), {"max_requests": limit})
    with pytest.raises(
        TypeError, match=rf"Bounded\.max_requests is {limit!r}: write a number of 6 or more"
    ):
        conformance(adapter)
