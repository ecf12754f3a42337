"""Graphs end before the group that they have sums of, which would wait for them otherwise."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import transformers

from roseinfer import LLM
from roseinfer.decode.graphs import StepGraphs
from roseinfer.decode.step_kind import StepKind
from tests.parallel.followers import build, in_threads
from tests.parallel.test_shares import SIZES

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Graph:
    """Notes if the group is still there when the graph ends."""

    def __init__(self, group: Callable[[], Any], seen: list[bool]) -> None:
        self._group, self._seen = group, seen

    def reset(self) -> None:
        self._seen.append(self._group() is not None)


def test_graphs_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    llm = LLM(build(transformers.LlamaConfig), **SIZES, tensor_parallel_size=2)
    assert llm.ranks is not None
    group, seen = weakref.ref(llm.ranks._group), list[bool]()
    rows: Any = SimpleNamespace(ranks=llm.ranks)
    graphs: Any = StepGraphs(lambda *_: None, rows, Counter())
    graphs._graphs[1, StepKind(greedy=True)] = Graph(group, seen), Counter()
    captured = graphs._graphs
    del llm, rows, graphs
    deadline = time.monotonic() + 20
    while group() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.1)
    assert group() is None
    assert seen == [True]
    assert not captured
