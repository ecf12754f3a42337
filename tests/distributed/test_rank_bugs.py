"""Bugs in what ranks tell each other: every one of them shows in the texts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM
from roseinfer.distributed.follower import Follower
from roseinfer.distributed.orders import (
    CopyBlocks,
    Forward,
    PutBlocks,
    PutRows,
    PutTokens,
    RankCommand,
)
from tests.distributed.followers import build, in_threads
from tests.distributed.test_sharded_models import MODELS, PARAMS, PROMPTS, SIZES, WAYS

if TYPE_CHECKING:
    from collections.abc import Callable


def _positions_shifted(order: RankCommand) -> RankCommand:
    if isinstance(order, Forward):
        plans = {
            group: replace(plan, positions=[at ^ 1 for at in plan.positions])
            for group, plan in order.plans.items()
        }
        return replace(order, plans=plans)
    return order


def _last_block_of_another(order: RankCommand) -> RankCommand:
    if isinstance(order, PutBlocks):
        return replace(order, numbers=[max(1, block - 1) for block in order.numbers])
    return order


def _without(kind: type[RankCommand]) -> Callable[[RankCommand], RankCommand | None]:
    return lambda order: None if isinstance(order, kind) else order


BUGS: dict[str, Callable[[RankCommand], RankCommand | None]] = {
    "copies that are not made": _without(CopyBlocks),
    "tokens stored beside their places": _positions_shifted,
    "rows that are not put": _without(PutRows),
    "new blocks that are not put": _without(PutBlocks),
    "blocks of others": _last_block_of_another,
}


def texts(**config: Any) -> list[Any]:
    """Serve some requests twice, the second time with prefixes from the first."""
    llm = LLM(build(MODELS["llama"]), **SIZES, **WAYS["resident"], **config)
    return [llm.generate(PROMPTS, PARAMS, progress=False) for _ in range(2)]


@pytest.mark.many_alike
@pytest.mark.parametrize("bug", BUGS)
def test_a_rank_that_does_something_else_is_found(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    do = Follower._execute

    def do_something_else(follower: Follower, order: RankCommand) -> None:
        if (changed := BUGS[bug](order)) is not None:
            do(follower, changed)

    in_threads(monkeypatch)
    monkeypatch.setattr(Follower, "_execute", do_something_else)
    assert texts(tensor_parallel_size=2) != texts()


def test_tokens_that_a_rank_makes_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Follower._put

    def put_others(follower: Follower, order: Any) -> None:
        put(follower, order)
        if isinstance(order, PutTokens):
            assert follower._rows is not None
            follower._rows.tokens[order.slots] ^= 1

    in_threads(monkeypatch)
    monkeypatch.setattr(Follower, "_put", put_others)
    assert texts(tensor_parallel_size=2) != texts()
