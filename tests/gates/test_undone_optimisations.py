"""Every optimisation undone is found by the work it costs, and named.

The baseline is the step as it is; then one thing at a time is undone. What must be named is
written beside it, since a gate that is red for another reason sends people the wrong way.
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


def measured(step: Step) -> StepWork:
    return measure_work(step, OwnCode(["roseinfer", "tests"]), "cpu")


def worse(now: Step, was: Step) -> str:
    """What the gate has to say about ``now``; it must be something."""
    verdict = judge(measured(now), measured(was), ())
    assert verdict.increases
    return "\n".join(verdict.increases + verdict.decreases)


def of_engine(name: str, policy: AppendPolicy = TORCH) -> Step:
    """A decode step with a list of blocks for each layer, where every switch counts."""
    return STEPS[name](
        "gpt2", "cpu", per_layer_kv=True, paged_attention=False, append_policy=policy
    )


CALLS = LAYERS * REQUESTS
SWITCHES = {
    "batched": (
        "steady",
        replace(TORCH, batched=False),
        [
            f"roseinfer.kv.calls.PerLayerMixin.append_token: {CALLS}, baseline 0",
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
            # a position for each row of each layer's plan
            f"staged_indices: {9 + 2 * CALLS}, baseline {9 + CALLS}",
            f"torch_vector: {LAYERS}, baseline 0",
        ],
    ),
    "batched_rollover": (
        "boundary",
        replace(TORCH, batched_rollover=False),
        [
            f"roseinfer.kv.calls.PerLayerMixin.append_token: {CALLS}, baseline 0",
            f"counters of its own, per_token: {CALLS}, baseline 0",
        ],
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_turned_off_is_named(name: str) -> None:
    step, without, causes = SWITCHES[name]
    said = worse(of_engine(step, without), of_engine(step))
    assert [cause for cause in causes if cause not in said] == [], said


def test_metadata_made_anew_for_every_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    was = measured(of_engine("steady"))
    real = planning.commit

    def commit(pool: Any, *rest: Any) -> AppendPlan:
        plan = real(pool, *rest)
        for index in plan.blocks:
            pool.infos[index] = replace(pool.infos[index])
        return plan

    monkeypatch.setattr(planning, "commit", commit)
    verdict = judge(measured(of_engine("steady")), was, ())
    said = "\n".join(verdict.increases + verdict.decreases)
    assert f"roseinfer.kv.pool.KVBlockInfo.__init__: {CALLS}, baseline 0" in said, said
    others = [line for line in verdict.increases if not line.startswith(("Python calls", "    "))]
    assert others == []


@interpreted
def test_a_block_table_uploaded_for_every_layer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Step:
        return STEPS["steady"]("gpt2", "cpu", paged_attention=True, append_policy=TORCH)

    was = measured(step())
    real = TritonAttention._block_table

    def forgetful(attention: TritonAttention, lists: Any, group: int) -> torch.Tensor:
        attention._block_tables.clear()
        return real(attention, lists, group)

    monkeypatch.setattr(TritonAttention, "_block_table", forgetful)
    verdict = judge(measured(step()), was, ())
    said = "\n".join(verdict.increases + verdict.decreases)
    assert f"table_rows: {LAYERS * REQUESTS}, baseline {REQUESTS}" in said, said


# ----------------------------------------------------------------------- more than the engine has


def within(step: Step, added: Callable[[], object]) -> Step:
    def run() -> None:
        step.run()
        added()

    return replace(step, run=run)


@pytest.fixture
def number() -> torch.Tensor:
    return torch.ones(())


def test_a_wait_for_the_device_is_named(number: torch.Tensor) -> None:
    waiting = within(of_engine("steady"), number.item)
    said = worse(waiting, of_engine("steady"))
    assert "waits for the device, item: 1, baseline 0" in said
    assert "copies to the host, bytes: 28, baseline 24" in said


def test_a_tensor_of_indices_built_in_the_step_is_named() -> None:
    building = within(of_engine("steady"), lambda: torch.tensor([3, 1, 2]))
    said = worse(building, of_engine("steady"))
    assert "torch operations, lift_fresh: " in said
    (line,) = (each for each in said.splitlines() if "copies to the device, bytes" in each)
    now, was = (int(number) for number in line.partition(": ")[2].split(", baseline "))
    assert now - was == 3 * 8


class SlotTable:
    """A block table that stays on the device, as engines with slots keep it."""

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.rows = [[slot, 0, 0] for slot in range(8)]
        self.device = torch.zeros((8, 3), dtype=torch.int64)
        self.counts = {"rows_uploaded": 0}

    def step(self) -> None:
        """One row gets a block."""
        self.rows[5][1] += 1
        for row in range(8) if self.whole else (5,):
            self.device[row].copy_(torch.tensor(self.rows[row]))
            self.counts["rows_uploaded"] += 1


def test_a_table_uploaded_whole_and_not_the_row_that_changed_is_named() -> None:
    steps = []
    for whole in (True, False):
        table = SlotTable(whole=whole)
        steps.append(Step(table.step, 8, None, lambda table=table: table.counts))  # type: ignore[misc]
    said = worse(*steps)
    assert "counters of its own, rows_uploaded: 8, baseline 1" in said
    assert f"copies to the device, bytes: {8 * 24}, baseline 24" in said


ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for graphs on a CPU")


class Graph(torch.cuda.CUDAGraph):
    """Stands in, on a CPU, for work that a device was taught."""

    def __new__(cls, _: object) -> Graph:
        return object.__new__(cls)

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work


@ON_A_CPU
def test_a_graph_that_is_used_no_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: graph.work())
    weights = torch.ones((4, 4))

    def work() -> None:
        weights.matmul(weights).relu_()

    with_graph, without = Step(Graph(work).replay, 4), Step(work, 4)
    said = worse(without, with_graph)
    assert "CUDA graph replays, replays: 0, baseline 1" in said


@ON_A_CPU
def test_a_graph_that_is_used_no_more_fails_with_nothing_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda _: None)
    graph = Graph(print)
    verdict = judge(measured(Step(lambda: len(()), 1)), measured(Step(graph.replay, 1)), ())
    assert "CUDA graph replays, replays: 0, baseline 1" in verdict.increases
