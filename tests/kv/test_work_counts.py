"""The cache's counters of its own work, call by call."""

from __future__ import annotations

import pytest

from roseinfer import AppendPolicy, BadArgument
from roseinfer.paths import Work
from tests.kv.twins import Twins


def test_plans_and_the_indices_staged_for_them(device: str) -> None:
    kv = (twins := Twins(device, AppendPolicy(triton=False), lengths=(2, 2, 2))).fast
    before = kv.work_counts.copy()
    kv.plan_append(twins.layer, twins.fast_lists)
    assert kv.work_counts - before == {Work.KV_PLANS: 1, Work.STAGED_INDICES: 3}


def test_a_position_for_each_row_is_staged_too(device: str) -> None:
    kv = (twins := Twins(device, AppendPolicy(triton=False), lengths=(1, 2, 3))).fast
    before = kv.work_counts.copy()
    kv.plan_append(twins.layer, twins.fast_lists)
    assert kv.work_counts - before == {Work.KV_PLANS: 1, Work.STAGED_INDICES: 6}


def test_a_refused_append_makes_no_plan(device: str) -> None:
    twins = Twins(device, AppendPolicy(triton=False), lengths=(2, 2))
    before = twins.fast.work_counts.copy()
    twisted = [twins.fast_lists[0], twins.fast_lists[0]]
    with pytest.raises(BadArgument):
        twins.fast.plan_append(twins.layer, twisted)
    assert twins.fast.work_counts == before
