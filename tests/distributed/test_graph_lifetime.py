"""Lifetime of graphs with all-reduces: they end before their process group."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer.decode.graphs import StepGraphs, StepKind
from roseinfer.distributed import ranks as module
from roseinfer.distributed.ranks import LeadingRank, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = 20.0


class Group:
    """Stand-in for an NCCL group, which ends only once no graph uses it."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self._without_graphs = threading.Event()

    def allreduce(self, *_: Any) -> None:
        """Do nothing, since there is one rank."""

    def abort(self) -> None:
        assert self._without_graphs.wait(_SECONDS)
        self.ended.append("group")

    def reset(self) -> None:
        """End the graph."""
        self.ended.append("graph")
        self._without_graphs.set()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    fake = Group()
    monkeypatch.setattr(module, "_group", lambda *_: fake)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return fake


def capture_and_drop(ranks: Ranks, graph: Any) -> None:
    """Capture a step, and drop the object that captured it."""
    rows: Any = SimpleNamespace(ranks=ranks)
    graphs = StepGraphs(lambda *_: None, rows, Counter())
    graphs._graphs[1, StepKind(greedy=True)] = graph, Counter()


def await_condition(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _SECONDS
    while not holds() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return holds()


CPU = torch.device("cpu")


def test_graphs_end_before_their_group(group: Group) -> None:
    ranks = Ranks(0, 1, None, CPU)
    capture_and_drop(ranks, group)
    del ranks
    assert await_condition(lambda: len(group.ended) == 2)
    assert group.ended == ["graph", "group"]


def links_of(group: Group, *, failed: bool = False) -> Any:
    return SimpleNamespace(
        on_failure=[], failed=failed, close=lambda: group.ended.append("other ranks")
    )


def test_other_ranks_end_after_the_group(group: Group) -> None:
    """NCCL blocks a process that ends a group after the others."""
    ranks = LeadingRank(links_of(group), 1, None, CPU)
    capture_and_drop(ranks, group)
    del ranks
    assert await_condition(lambda: len(group.ended) == 3)
    assert group.ended == ["graph", "group", "other ranks"]


def test_graphs_end_while_a_failure_waits(group: Group) -> None:
    links = links_of(group)
    ranks = LeadingRank(links, 1, None, CPU)
    capture_and_drop(ranks, group)
    failure = threading.Thread(target=links.on_failure[0])
    failure.start()
    del ranks
    assert await_condition(lambda: len(group.ended) == 4)
    failure.join(_SECONDS)
    assert group.ended[0] == "graph"
    assert sorted(group.ended[1:]) == ["group", "group", "other ranks"]


def test_earlier_failure_ends_the_group(group: Group) -> None:
    group.reset()
    ranks = LeadingRank(links_of(group, failed=True), 1, None, CPU)
    assert group.ended == ["graph", "group"]
    del ranks


def test_graphs_of_a_failed_capture_end_at_once(group: Group) -> None:
    def step(count: int, _: Any) -> None:
        graphs._graphs[count, StepKind(greedy=True)] = graph, Counter()
        raise RuntimeError("it waits for the host")

    ranks = Ranks(0, 1, None, CPU)
    rows: Any = SimpleNamespace(ranks=ranks, all_padding=threading.Lock)
    graph: Any = SimpleNamespace(reset=group.reset)
    graphs = StepGraphs(step, rows, Counter())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
        assert not graphs.capture([1], required=False)
    assert group.ended == ["graph"]
    assert not graphs._graphs
