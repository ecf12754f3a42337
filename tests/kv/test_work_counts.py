"""Work counters of the cache, per call."""

from __future__ import annotations

import pytest

from roseinfer import AppendPolicy, BadArgument
from roseinfer.paths import Work
from tests.kv.twins import Twins


def test_plans_and_staged_indices_are_counted(device: str) -> None:
    kv = (twins := Twins(device, AppendPolicy(triton=False), lengths=(2, 2, 2))).fast
    before = kv.work_counts.copy()
    kv.plan_append(twins.layer, twins.fast_lists)
    assert kv.work_counts - before == {Work.KV_PLANS: 1, Work.STAGED_INDICES: 3}


def test_staged_positions_are_counted(device: str) -> None:
    kv = (twins := Twins(device, AppendPolicy(triton=False), lengths=(1, 2, 3))).fast
    before = kv.work_counts.copy()
    kv.plan_append(twins.layer, twins.fast_lists)
    assert kv.work_counts - before == {Work.KV_PLANS: 1, Work.STAGED_INDICES: 6}


def test_rejected_append_counts_no_plan(device: str) -> None:
    twins = Twins(device, AppendPolicy(triton=False), lengths=(2, 2))
    before = twins.fast.work_counts.copy()
    repeated_lists = [twins.fast_lists[0], twins.fast_lists[0]]
    with pytest.raises(BadArgument):
        twins.fast.plan_append(twins.layer, repeated_lists)
    assert twins.fast.work_counts == before
