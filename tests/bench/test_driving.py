"""Ways to drive the engine, on a simulated clock."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import LLM, EnginePath, SamplingParams
from roseinfer.bench.cases import naive, offline, online, paced
from roseinfer.bench.driver import (
    LatencyRow,
    MemoryFloor,
    RequestFailed,
    RunRecord,
    StepRecord,
    ThroughputRow,
    Timeline,
    Workload,
    decode_floor_s,
    latencies,
    median_row,
    run_workload,
    tokenized_prompts,
)
from tests.bench.clock import make_steps_take_a_second

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.bench.driver import Run
    from roseinfer.engine.engine import Update

FOUR = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
FLOOR = MemoryFloor(weight_bytes=1000, token_bytes=10, bandwidth=1e3)
PROMPTS = ("one", "two", "six")


@pytest.fixture
def llm() -> LLM:
    """Return an engine that runs two of three requests at once."""
    return LLM("tiny", device="cpu", max_batch_size=2)


def run(
    llm: LLM, drive: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch, workers: int = 0
) -> RunRecord:
    make_steps_take_a_second(llm, monkeypatch)
    return run_workload(llm.engine, Workload(PROMPTS, FOUR), drive, llm.tokenizer, workers)


def four_from(first: float) -> tuple[float, ...]:
    return tuple(first + more for more in range(4))


ARRIVAL_MODES: dict[str, tuple[Callable[[Run], None], list[Timeline]]] = {
    "naive": (
        naive,
        [
            Timeline(0, 0, four_from(1)),
            Timeline(4, 4, four_from(5)),
            Timeline(8, 8, four_from(9)),
        ],
    ),
    "offline": (
        offline,
        [
            Timeline(0, 0, four_from(1)),
            Timeline(0, 0, four_from(1)),
            Timeline(0, 4, four_from(5)),
        ],
    ),
    "online": (
        online,
        [
            Timeline(0, 0, four_from(1)),
            Timeline(1, 1, four_from(2)),
            Timeline(2, 4, four_from(5)),
        ],
    ),
    "paced, arrivals during a step": (
        paced(1.5),
        [
            Timeline(0, 0, four_from(1)),
            Timeline(1.5, 2, four_from(3)),
            Timeline(3, 4, four_from(5)),
        ],
    ),
    "paced, idle between arrivals": (
        paced(4.5),
        [
            Timeline(0, 0, four_from(1)),
            Timeline(4.5, 4.5, four_from(5.5)),
            Timeline(9, 9, four_from(10)),
        ],
    ),
}


@pytest.mark.parametrize("mode", ARRIVAL_MODES)
def test_every_time_is_recorded(mode: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drive, timelines = ARRIVAL_MODES[mode]
    record = run(llm, drive, monkeypatch)
    assert record.timelines == timelines
    assert record.steps[-1].ended_at == max(timeline.tokens[-1] for timeline in timelines)
    assert record.prompt_lengths == [3, 3, 3]


def test_all_arrival_modes_generate_the_same_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [output.token_ids for output in llm.generate(PROMPTS, FOUR)]
    for drive, _ in ARRIVAL_MODES.values():
        assert run(llm, drive, monkeypatch).token_ids == expected


def test_runs_share_no_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("tiny", device="cpu", block_size=2)

    def hits_of_two_runs() -> int:
        before = llm.engine.path_counts[EnginePath.PREFIX_HIT]
        for _ in range(2):
            run(llm, offline, monkeypatch)
        return llm.engine.path_counts[EnginePath.PREFIX_HIT] - before

    assert hits_of_two_runs() == 0
    assert llm.engine.prefixes is not None
    monkeypatch.setattr(llm.engine.prefixes, "clear", lambda: None)
    assert hits_of_two_runs() > 0


def test_call_without_tokens_counts_to_the_next_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine returns tokens at every second call, as one that runs ahead may."""
    step = llm.engine.step
    pending: list[Update] = []
    calls = iter(range(100))

    def step_at_every_second_call() -> list[Update]:
        pending.extend(step())
        if next(calls) % 2 == 0 and llm.engine.has_work:
            return []
        updates = list(pending)
        pending.clear()
        return updates

    monkeypatch.setattr(llm.engine, "step", step_at_every_second_call)
    record = run(llm, naive, monkeypatch)
    assert [(s.started_at, s.ended_at, s.requests) for s in record.steps[:2]] == [
        (0, 2, [0, 0]),
        (2, 4, [0, 0]),
    ]
    row = ThroughputRow.of("naive", record, FLOOR)
    assert (row.decode_s, row.decode_step_ms, row.decode_tok_per_s) == (6.0, 1000.0, 1.0)


def test_dropped_token_fails_the_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.step
    dropped: list[Update] = []

    def step_without_a_token() -> list[Update]:
        updates = step()
        if not dropped:
            dropped.append(updates.pop())
        return updates

    monkeypatch.setattr(llm.engine, "step", step_without_a_token)
    with pytest.raises(RequestFailed, match="4 tokens generated, 3 delivered"):
        run_workload(llm.engine, Workload(PROMPTS, FOUR), offline)


def test_failed_request_fails_the_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "roseinfer.engine.runner.rows_without_a_distribution",
        lambda logits: torch.ones(len(logits), dtype=torch.bool),
    )
    with pytest.raises(RequestFailed, match=r"request 0: failed: .* NaN"):
        run_workload(llm.engine, Workload(PROMPTS, FOUR), offline)


# --------------------------------------------------------------------------------- prompts


class SlowTokenizer:
    """Tokenizer that waits for an event of the test."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.threads: set[str] = set()

    def encode(self, text: str) -> list[int]:
        self.threads.add(threading.current_thread().name.rpartition("_")[0])
        assert self.released.wait(10)
        return [len(text)]


def test_workers_tokenize_in_the_background() -> None:
    tokenizer = SlowTokenizer()
    with tokenized_prompts(("a", "bb", "ccc"), tokenizer, workers=2) as prompts:
        assert len(prompts) == 3
        assert not prompts[0].done()
        tokenizer.released.set()
        assert [prompt.result() for prompt in prompts] == [[1], [2], [3]]
        assert prompts[2].done()
    assert tokenizer.threads == {"tokenize"}


def test_without_workers_the_engine_gets_the_text() -> None:
    with tokenized_prompts(("a", "bb"), SlowTokenizer()) as prompts:
        assert prompts[1].done()
        assert prompts[1].result() == "bb"


def test_run_with_workers_generates_the_same_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(llm, offline, monkeypatch).token_ids
    assert run(llm, paced(1.5), monkeypatch, workers=2).token_ids == expected


# --------------------------------------------------------------------------------- figures


def test_decode_time_excludes_steps_with_a_first_token(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ThroughputRow.of("offline", run(llm, offline, monkeypatch), FLOOR)
    assert (row.requests, row.prompt_tokens, row.completion_tokens) == (3, 9, 12)
    assert (row.total_s, row.decode_s, row.decode_step_ms) == (8.0, 6.0, 1000.0)
    assert row.completion_tok_per_s == 12 / 8
    assert row.decode_tok_per_s == 9 / 6
    assert row.total_tok_per_s == (9 + 12) / 8
    # Six passes; each request's three later tokens attend to 4, 5 and 6 stored ones.
    assert row.floor_ratio == pytest.approx(6.0 / ((6 * 1000 + 3 * (4 + 5 + 6) * 10) / 1e3))


def test_run_without_decoding_has_no_decode_figures(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_steps_take_a_second(llm, monkeypatch)
    one = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    record = run_workload(llm.engine, Workload(PROMPTS, one), offline)
    row = ThroughputRow.of("offline", record, FLOOR)
    assert row.decode_s is row.decode_step_ms is row.decode_tok_per_s is row.floor_ratio is None
    rows = {row.metric: row for row in latencies("offline", record.timelines)}
    assert rows["TPOT"].p50_ms is rows["ITL"].p99_ms is None
    assert rows["TTFT"].p50_ms == 1000.0


def test_call_with_two_tokens_of_a_request_is_two_steps() -> None:
    steps = [StepRecord(0, 1, [0]), StepRecord(1, 3, [0, 0])]
    record = RunRecord(0, steps, [Timeline(0, 0, (1, 3, 3))], [5], [[7, 7, 7]])
    assert record.decode_steps() == steps[1:]
    assert steps[1].pass_ms == 1000.0
    assert decode_floor_s(record, steps[1:], FLOOR) == (2 * 1000 + (6 + 7) * 10) / 1e3


def test_latencies_have_percentiles() -> None:
    timelines = [Timeline(0, 0, (float(first), float(first + 1))) for first in range(1, 102)]
    rows = {row.metric: row for row in latencies("x", timelines)}
    assert list(rows) == ["TTFT", "TPOT", "ITL", "latency", "queue wait"]
    first = rows["TTFT"]
    assert (first.p50_ms, first.p95_ms, first.p99_ms) == pytest.approx((51e3, 96e3, 100e3))
    assert first.mean_ms == pytest.approx(51e3)
    assert rows["TPOT"].p99_ms == rows["ITL"].p50_ms == 1000.0
    assert rows["queue wait"].p99_ms == 0.0


def test_median_row_takes_medians_by_field() -> None:
    rows = [
        LatencyRow("x", "TTFT", 1.0, 30.0, None, 5.0),
        LatencyRow("x", "TTFT", 9.0, 20.0, None, 4.0),
        LatencyRow("x", "TTFT", 2.0, 10.0, None, 6.0),
    ]
    assert median_row(rows) == LatencyRow("x", "TTFT", 2.0, 20.0, None, 5.0)
