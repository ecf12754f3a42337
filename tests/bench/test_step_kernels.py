"""Kernels of a decode step: names, times, and declared bytes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer.gates.bytes_moved import ByteRecorder
from roseinfer import LLM, SamplingParams
from roseinfer.bench import trace
from roseinfer.bench.trace import (
    NUM_PROFILED_STEPS,
    bypass_graphs,
    kernel_rows,
    measure_kernels,
    record_declared_traffic,
    short_name,
)
from roseinfer.decode.graphs import StepGraphs, StepKind
from tests.gates.byte_steps import FUSED, NARROW, narrow_gpt2, second_token
from tests.interpreted import interpreted

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("_decode_kernel", "_decode_kernel"),
        ("roseinfer.kernels.triton.norm._add_norm_kernel", "_add_norm_kernel"),
        ("nvjet_tst_64x8_64x16_2x1_v_bz_TNT", "nvjet_tst_64x8_64x16_2x1_v_bz_TNT"),
        ("void at::native::elementwise_kernel<128, at::native::f(int)>(int)", "elementwise_kernel"),
        ("void at::native::(anonymous namespace)::softmax<4, float>(float*)", "softmax"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
    ],
)
def test_short_name_of_a_kernel(full: str, short: str) -> None:
    assert short_name(full) == short


def test_events_are_summed_by_kernel() -> None:
    events = [("_decode_kernel", 3.0), ("_decode_kernel", 5.0), ("void gemm<1>(int)", 20.0)]
    gemm, decode = kernel_rows(
        7, events * NUM_PROFILED_STEPS, {"_decode_kernel": 4_000_000}, step_us=40.0, bandwidth=1e12
    )
    assert (gemm.kernel, gemm.calls, gemm.us, gemm.share) == ("gemm", 1, 20.0, 0.5)
    assert (gemm.traffic_mb, gemm.traffic_us) == (None, None)
    assert (decode.kernel, decode.calls, decode.us, decode.share) == ("_decode_kernel", 2, 8.0, 0.2)
    assert decode.traffic_mb == 4.0
    assert decode.traffic_us == pytest.approx(4.0)
    assert {gemm.sequences, decode.sequences} == {7}


@pytest.mark.sampled_cases
@interpreted
@pytest.mark.parametrize("family", NARROW)
def test_declared_bytes_equal_those_of_the_gate(family: str) -> None:
    decode = second_token(NARROW[family]("cpu"), "cpu", **FUSED)
    decode.step.prepare()
    with ByteRecorder("cpu") as recorder, record_declared_traffic() as traffic:
        decode.step.run()
    moved: Counter[str] = Counter()
    for move in recorder.accesses:
        assert isinstance(move.amount, int)
        moved[move.by] += move.amount
    assert "_decode_kernel" in traffic
    assert traffic == {kernel: moved[kernel] for kernel in traffic}
    assert {name for name in moved if name.endswith("_kernel")} == traffic.keys()


def test_bypass_graphs_runs_the_step() -> None:
    steps: list[tuple[int, StepKind]] = []
    graphs = object.__new__(StepGraphs)
    step: Callable[..., None] = lambda *args: steps.append(args)  # noqa: E731
    graphs._step = step
    with bypass_graphs():
        graphs.run(3, StepKind(greedy=True))
    assert steps == [(3, StepKind(greedy=True))]


@pytest.mark.slow
@interpreted
def test_profiled_steps_do_not_record_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stub replaces the profiler, which needs a GPU."""
    llm = LLM(narrow_gpt2("cpu"), device="cpu", block_size=16, kv_cache_tokens=512, **FUSED)
    calls: Counter[str] = Counter()

    def stub_device_events(
        call: Callable[[], Any], count: int, _sync: object
    ) -> list[tuple[str, float]]:
        for _ in range(count):
            call()
        calls["profiled"] += count
        return [("_decode_kernel", 2.0)] * count

    monkeypatch.setattr(trace, "device_events", stub_device_events)
    params = SamplingParams(max_new_tokens=trace.STEPS + 4, ignore_eos=True)
    request = llm.engine.submit([1, 2, 3], params)
    while not request.num_generated:
        llm.engine.step()
    (row,) = measure_kernels(llm.engine, 1, step_us=10.0, bandwidth=1e9)
    assert calls["profiled"] == NUM_PROFILED_STEPS
    assert (row.kernel, row.calls, row.us, row.share) == ("_decode_kernel", 1.0, 2.0, 0.2)
    assert row.traffic_mb is not None
    assert row.traffic_us == pytest.approx(row.traffic_mb * 1e6 / 1e9 * 1e6)
