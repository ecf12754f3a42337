"""Planted bugs in the commands between ranks: each changes the tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM
from roseinfer.distributed.follower import Follower
from roseinfer.distributed.ranks import (
    CopyBlocks,
    Forward,
    PutBlocks,
    PutFirstTokens,
    PutRows,
    PutTokens,
    RankCommand,
)
from roseinfer.paths import EnginePath
from tests.distributed.followers import build, run_ranks_in_threads
from tests.distributed.test_sharded_models import MODELS, PARAMS, PROMPTS, SETTINGS, SIZES

if TYPE_CHECKING:
    from collections.abc import Callable


def _shift_positions(order: RankCommand) -> RankCommand:
    if isinstance(order, Forward):
        plans = {
            group: replace(plan, positions=[at ^ 1 for at in plan.positions])
            for group, plan in order.plans.items()
        }
        return replace(order, plans=plans)
    return order


def _use_other_blocks(order: RankCommand) -> RankCommand:
    if isinstance(order, PutBlocks):
        return replace(order, numbers=[max(1, block - 1) for block in order.numbers])
    return order


def _skip(kind: type[RankCommand]) -> Callable[[RankCommand], RankCommand | None]:
    return lambda order: None if isinstance(order, kind) else order


BUGS: dict[str, Callable[[RankCommand], RankCommand | None]] = {
    "skipped copies": _skip(CopyBlocks),
    "tokens at wrong positions": _shift_positions,
    "skipped rows": _skip(PutRows),
    "skipped new blocks": _skip(PutBlocks),
    "wrong blocks": _use_other_blocks,
    "skipped tokens of prompts": _skip(PutFirstTokens),
}


def serve_twice(**config: Any) -> list[Any]:
    """Serve some requests twice, the second time with prefix hits."""
    settings = SETTINGS["resident"] | {"prompt_rows": 4}  # for those that are left of a prefix
    llm = LLM(build(MODELS["llama"]), **SIZES, **settings, **config)
    return [llm.generate(PROMPTS, PARAMS, progress=False) for _ in range(2)]


@pytest.mark.sampled_cases
@pytest.mark.parametrize("bug", BUGS)
def test_wrong_command_changes_tokens(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = Follower._execute

    def execute_with_bug(follower: Follower, order: RankCommand) -> None:
        if (changed := BUGS[bug](order)) is not None:
            execute(follower, changed)

    run_ranks_in_threads(monkeypatch)
    monkeypatch.setattr(Follower, "_execute", execute_with_bug)
    assert serve_twice(tensor_parallel_size=2) != serve_twice()


def test_wrong_tokens_of_a_rank_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Follower._put

    def put_wrong_tokens(follower: Follower, order: Any) -> None:
        put(follower, order)
        if isinstance(order, PutTokens):
            follower._steps[EnginePath.RESIDENT].rows.tokens[order.slots] ^= 1

    run_ranks_in_threads(monkeypatch)
    monkeypatch.setattr(Follower, "_put", put_wrong_tokens)
    assert serve_twice(tensor_parallel_size=2) != serve_twice()
