"""Rank 1 in a process of its own: it has the leader's tables, and its share of the cache.

One of the ranks has less memory than the other. The state of rank 1 is queried from its process.
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
from roseinfer.distributed.ranks import ReportState
from roseinfer.models import loading
from tests.distributed.rank_models import build_on, build_with_limit
from tests.distributed.test_sharded_models import PARAMS, PROMPTS, SIZES
from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

_TOKENS = 72
"""Tokens of the smaller cache, which is too small for all requests."""
_TOKEN_BYTES = 2 * 2 * 2 * 12 * 4
"""Keys and values, layers, heads of one rank, width, and bytes of a number."""
_SMALL, _LARGE = _TOKENS * _TOKEN_BYTES, 3 * _TOKENS * _TOKEN_BYTES
_CACHE_BYTES = {"llama": (_LARGE, _SMALL), "mistral": (_SMALL, _LARGE)}
"""Bytes for a cache of the leader, and of rank 1."""


@dataclass
class Pair:
    """Engines of one model that get the same requests."""

    model: str
    alone: LLM
    sharded: LLM

    def steps(self) -> Iterator[None]:
        """Serve some requests, two with a shared prefix; yield after each step of both."""
        alone, sharded = self.alone.engine, self.sharded.engine
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            alone.submit(prompt, params)
            sharded.submit(prompt, params)
        while alone.has_work or sharded.has_work:
            alone.step()
            sharded.step()
            yield

    def query_rank_1(self, name: str) -> Any:
        """Query the state of rank 1 from its process."""
        assert self.sharded.ranks is not None
        (state,) = self.sharded.ranks.query_ranks(ReportState(name))
        return state


@pytest.fixture(scope="module", params=_CACHE_BYTES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    model = request.param
    leaders, other = _CACHE_BYTES[model]
    config = SIZES | {"max_batch_size": 4, "resident_decode": True}
    alone = LLM(partial(build_on, model=model), **config | {"kv_cache_tokens": _TOKENS})
    more = {"tensor_parallel_size": 2, "kv_cache_tokens": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the other process imports the module of ``build_on`` from there
        patch.setattr(loading, "_MAX_CPU_CACHE_BYTES", leaders)
        build = partial(build_with_limit, model=model, leader=os.getpid(), max_bytes=other)
        sharded = LLM(build, **config | more)
    assert sharded.ranks is not None
    (process,) = sharded.ranks.rank_connections.child_processes
    yield Pair(model, alone, sharded)
    assert process.poll() is None
    sharded.ranks.rank_connections.close()
    process.wait(20)


def test_number_of_blocks_fits_the_rank_with_less_memory(pair: Pair) -> None:
    kv = pair.sharded.engine.sequence_runner.kv
    assert kv.max_blocks_per_layer == _TOKENS // SIZES["block_size"] + 1  # one is scratch
    keys, values = pair.query_rank_1("caches")
    assert keys.shape == values.shape == kv.keys.shape


def tables_of(llm: LLM) -> list[Any]:
    """Return the leader's block tables on its device."""
    rows = llm.engine._runner._resident.slots.rows  # type: ignore[union-attr]
    return [table.tolist() for table in rows.tables(len(rows.tokens))]


def test_tables_are_equal_on_all_ranks_after_each_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards: list[Any] = []
    attention = pair.sharded.engine.sequence_runner.attention
    prepare = attention.prepare

    def recorded_prepare(batch: Any) -> None:
        if hasattr(batch, "block_lists"):
            forwards.append(deepcopy(batch.block_lists))
        prepare(batch)

    monkeypatch.setattr(attention, "prepare", recorded_prepare)
    steps = 0
    for _ in pair.steps():
        steps += 1
        lists, slots = pair.query_rank_1("tables")
        assert lists == forwards[-1]
        assert slots == tables_of(pair.sharded)
    assert steps > 30
    assert pair.sharded.engine.num_preemptions or pair.model == "mistral"  # which frees blocks


def test_cache_shares_of_ranks_form_the_whole_cache(pair: Pair) -> None:
    whole, own = pair.alone.engine.sequence_runner.kv, pair.sharded.engine.sequence_runner.kv
    for _ in pair.steps():
        others = pair.query_rank_1("caches")
        for kind, mine, theirs in zip(
            (whole.keys, whole.values), (own.keys, own.values), others, strict=True
        ):
            assert kind.any()
            # The scratch block has what padding wrote last.
            together = torch.cat([mine, theirs], 2)[:, 1:]
            torch.testing.assert_close(together, kind[:, 1:], atol=1e-4, rtol=1e-4)
