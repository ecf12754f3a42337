"""Rank 1 in a process of its own has the leader's tables, and what the leader has not of the cache.

One of the ranks has less memory than the other. What rank 1 has comes from its process, by a link.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM
from roseinfer.distributed.orders import ReportState
from roseinfer.models import loading
from tests.distributed.rank_models import made, made_with_room
from tests.distributed.test_sharded_models import PARAMS, PROMPTS, SIZES
from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKENS = 72
"""Tokens of the smaller cache, which are too few for all requests."""
_TOKEN_BYTES = 2 * 2 * 2 * 12 * 4
"""Keys and values, layers, heads of one rank, width, and bytes of a number."""
_SMALL, _LARGE = _TOKENS * _TOKEN_BYTES, 3 * _TOKENS * _TOKEN_BYTES
_ROOMS = {"llama": (_LARGE, _SMALL), "mistral": (_SMALL, _LARGE)}
"""Bytes that the leader has for a cache, and those of rank 1."""


@dataclass
class Pair:
    """Engines of one model that are asked for the same."""

    model: str
    alone: LLM
    shared: LLM

    def steps(self) -> Iterator[None]:
        """Serve some requests, of which two begin alike; yield after each step of both."""
        alone, shared = self.alone.engine, self.shared.engine
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            alone.submit(prompt, params)
            shared.submit(prompt, params)
        while alone.has_work or shared.has_work:
            alone.step()
            shared.step()
            yield

    def of_rank_1(self, what: str) -> Any:
        """Ask its process what it has."""
        assert self.shared.ranks is not None
        (found,) = self.shared.ranks.query_ranks(ReportState(what))
        return found


@pytest.fixture(scope="module", params=_ROOMS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    model = request.param
    leaders, other = _ROOMS[model]
    config = SIZES | {"max_batch_size": 4, "resident_decode": True}
    alone = LLM(partial(made, model=model), **config | {"kv_cache_tokens": _TOKENS})
    more = {"tensor_parallel_size": 2, "kv_cache_tokens": None}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)  # the other process imports the module of ``made`` from there
        patched.setattr(loading, "_MAX_CPU_CACHE_BYTES", leaders)
        by_each = partial(made_with_room, model=model, leader=os.getpid(), room=other)
        shared = LLM(by_each, **config | more)
    assert shared.ranks is not None
    (process,) = shared.ranks.rank_connections.child_processes
    yield Pair(model, alone, shared)
    assert process.poll() is None
    shared.ranks.rank_connections.close()
    process.wait(20)


def test_there_are_as_many_blocks_as_the_rank_with_less_memory_has_room_for(pair: Pair) -> None:
    kv = pair.shared.engine.sequence_runner.kv
    assert kv.max_blocks_per_layer == _TOKENS // SIZES["block_size"] + 1  # one is scratch
    keys, values = pair.of_rank_1("caches")
    assert keys.shape == values.shape == kv.keys.shape


def tables_of(llm: LLM) -> list[Any]:
    """Return what the leader has on its device of the slots' blocks."""
    rows = llm.engine._runner._resident.slots.rows  # type: ignore[union-attr]
    return [table.tolist() for table in rows.tables(len(rows.tokens))]


def test_tables_are_equal_on_all_ranks_after_every_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards: list[Any] = []
    attention = pair.shared.engine.sequence_runner.attention
    prepare = attention.prepare

    def noted(batch: Any) -> None:
        if hasattr(batch, "block_lists"):
            forwards.append(deepcopy(batch.block_lists))
        prepare(batch)

    monkeypatch.setattr(attention, "prepare", noted)
    steps = 0
    for _ in pair.steps():
        steps += 1
        lists, slots = pair.of_rank_1("tables")
        assert lists == forwards[-1]
        assert slots == tables_of(pair.shared)
    assert steps > 30
    assert pair.shared.engine.num_preemptions or pair.model == "mistral"  # which forgets tokens


def test_the_shares_of_the_cache_are_the_whole_after_every_step(pair: Pair) -> None:
    whole, own = pair.alone.engine.sequence_runner.kv, pair.shared.engine.sequence_runner.kv
    for _ in pair.steps():
        others = pair.of_rank_1("caches")
        for kind, mine, theirs in zip(
            (whole.keys, whole.values), (own.keys, own.values), others, strict=True
        ):
            assert kind.any()
            # The scratch block has what padding wrote last.
            together = torch.cat([mine, theirs], 2)[:, 1:]
            torch.testing.assert_close(together, kind[:, 1:], atol=1e-4, rtol=1e-4)
