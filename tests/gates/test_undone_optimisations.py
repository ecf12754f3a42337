"""Optimisations of a step's work: undoing each is found by its work, and named.

The baseline is the unchanged step; then one optimisation at a time is undone. The expected
message names the cause, since a gate that fails for another reason misleads its users.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_roseinfer.gates.step_work import OwnCode, Step, judge, measure_work
from roseinfer import AppendPolicy
from roseinfer.attention.triton import TritonAttention
from roseinfer.kv import plan as planning
from tests.gates.decode_steps import REQUESTS, STEPS
from tests.interpreted import interpreted

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer.gates.step_work import StepWork
    from roseinfer.kv.plan import AppendPlan

TORCH = AppendPolicy(triton=False)
LAYERS = 2


def measure(step: Step) -> StepWork:
    return measure_work(step, OwnCode(["roseinfer", "tests"]), "cpu")


def increases_of(changed: Step, baseline: Step) -> str:
    """Return the gate's message about ``changed``, which must have increases."""
    verdict = judge(measure(changed), measure(baseline), ())
    assert verdict.increases
    return "\n".join(verdict.increases + verdict.decreases)


def engine_step(name: str, policy: AppendPolicy = TORCH) -> Step:
    """Return a decode step with block lists per layer, on which every option has effect."""
    return STEPS[name](
        "gpt2", "cpu", per_layer_kv=True, paged_attention=False, append_policy=policy
    )


CALLS = LAYERS * REQUESTS
SWITCHES = {
    "batched": (
        "steady",
        replace(TORCH, batched=False),
        [
            f"roseinfer.kv.manager.KVBlockManager.append_token: {CALLS}, baseline 0",
            f"counters of its own, per_token: {CALLS}, baseline 0",
        ],
    ),
    "identity": (
        "steady",
        replace(TORCH, identity=False),
        ["torch operations, index_select: ", f"torch_gather: {LAYERS}, baseline 0"],
    ),
    "scalar_position": (
        "steady",
        replace(TORCH, scalar_position=False),
        [
            # a position per row in each layer's plan
            f"staged_indices: {9 + 2 * CALLS}, baseline {9 + CALLS}",
            f"torch_vector: {LAYERS}, baseline 0",
        ],
    ),
    "batched_rollover": (
        "boundary",
        replace(TORCH, batched_rollover=False),
        [
            f"roseinfer.kv.manager.KVBlockManager.append_token: {CALLS}, baseline 0",
            f"counters of its own, per_token: {CALLS}, baseline 0",
        ],
    ),
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("name", SWITCHES)
def test_append_option_turned_off_is_named(name: str) -> None:
    step, changed_policy, causes = SWITCHES[name]
    message = increases_of(engine_step(step, changed_policy), engine_step(step))
    assert [cause for cause in causes if cause not in message] == [], message


def test_block_metadata_rebuilt_for_every_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = measure(engine_step("steady"))
    real = planning.commit

    def commit(pool: Any, *rest: Any) -> AppendPlan:
        plan = real(pool, *rest)
        for index in plan.blocks:
            pool.infos[index] = replace(pool.infos[index])
        return plan

    monkeypatch.setattr(planning, "commit", commit)
    verdict = judge(measure(engine_step("steady")), baseline, ())
    message = "\n".join(verdict.increases + verdict.decreases)
    assert f"roseinfer.kv.pool.KVBlockInfo.__init__: {CALLS}, baseline 0" in message, message
    others = [line for line in verdict.increases if not line.startswith(("Python calls", "    "))]
    assert others == []


@pytest.mark.slow
@interpreted
def test_block_table_uploaded_for_every_layer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Step:
        return STEPS["steady"]("gpt2", "cpu", paged_attention=True, append_policy=TORCH)

    baseline = measure(step())
    real = TritonAttention._block_table

    def without_caching(attention: TritonAttention, lists: Any, group: int) -> torch.Tensor:
        attention._block_tables.clear()
        return real(attention, lists, group)

    monkeypatch.setattr(TritonAttention, "_block_table", without_caching)
    verdict = judge(measure(step()), baseline, ())
    message = "\n".join(verdict.increases + verdict.decreases)
    assert f"table_rows: {LAYERS * REQUESTS}, baseline {REQUESTS}" in message, message


# ------------------------------------------------------------- beyond the engine's own work


def with_extra_work(step: Step, extra_work: Callable[[], object]) -> Step:
    def run() -> None:
        step.run()
        extra_work()

    return replace(step, run=run)


@pytest.fixture
def number() -> torch.Tensor:
    return torch.ones(())


def test_synchronisation_with_the_device_is_named(number: torch.Tensor) -> None:
    changed_step = with_extra_work(engine_step("steady"), number.item)
    message = increases_of(changed_step, engine_step("steady"))
    assert "waits for the device, item: 1, baseline 0" in message
    assert "copies to the host, bytes: 28, baseline 24" in message


def test_index_tensor_built_in_the_step_is_named() -> None:
    changed_step = with_extra_work(engine_step("steady"), lambda: torch.tensor([3, 1, 2]))
    message = increases_of(changed_step, engine_step("steady"))
    assert "torch operations, lift_fresh: " in message
    (line,) = (each for each in message.splitlines() if "copies to the device, bytes" in each)
    changed, was = (int(number) for number in line.partition(": ")[2].split(", baseline "))
    assert changed - was == 3 * 8


class SlotTable:
    """A block table that stays on the device, as in engines with slots."""

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.rows = [[slot, 0, 0] for slot in range(8)]
        self.device = torch.zeros((8, 3), dtype=torch.int64)
        self.counts = {"rows_uploaded": 0}

    def step(self) -> None:
        """Add a block to one row."""
        self.rows[5][1] += 1
        for row in range(8) if self.whole else (5,):
            self.device[row].copy_(torch.tensor(self.rows[row]))
            self.counts["rows_uploaded"] += 1


def test_upload_of_the_whole_table_is_named() -> None:
    steps = []
    for whole in (True, False):
        table = SlotTable(whole=whole)
        steps.append(Step(table.step, 8, None, lambda table=table: table.counts))  # type: ignore[misc]
    message = increases_of(*steps)
    assert "counters of its own, rows_uploaded: 8, baseline 1" in message
    assert f"copies to the device, bytes: {8 * 24}, baseline 24" in message


ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates graphs on a CPU")


class Graph(torch.cuda.CUDAGraph):
    """A stand-in, on a CPU, for a captured CUDA graph."""

    def __new__(cls, _: object) -> Graph:
        return object.__new__(cls)

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work


@ON_A_CPU
def test_missing_graph_replay_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: graph.work())
    weights = torch.ones((4, 4))

    def work() -> None:
        weights.matmul(weights).relu_()

    with_graph, without_graph = Step(Graph(work).replay, 4), Step(work, 4)
    message = increases_of(without_graph, with_graph)
    assert "CUDA graph replays, replays: 0, baseline 1" in message


@ON_A_CPU
def test_missing_graph_replay_without_other_work_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda _: None)
    graph = Graph(print)
    verdict = judge(measure(Step(lambda: len(()), 1)), measure(Step(graph.replay, 1)), ())
    assert "CUDA graph replays, replays: 0, baseline 1" in verdict.increases
