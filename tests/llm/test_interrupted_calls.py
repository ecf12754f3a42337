"""Interrupted calls leave no request or block, and streams survive them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.continuations import (
    TEXTS,
    during_a_stream,
    greedy,
    small_llm,
    transformers_continuation,
)
from tests.engine.test_random_mixes import assert_no_block_is_lost

if TYPE_CHECKING:
    from roseinfer import LLM


class Interrupter:
    """Error that is raised at the n-th call."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.remaining = error, at

    def count(self) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise self.error


def interrupt(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, where: str, error: BaseException, step: int = 3
) -> None:
    """Make a step fail at its start, between two layers, or with everything stored."""
    interrupter = Interrupter(error, step)
    if where == "between layers":
        attention = llm.engine.sequence_runner.attention
        store_and_attend = attention.store_and_attend

        def broken_attend(layer: int, *args: Any) -> Any:
            if layer == 1:
                interrupter.count()
            return store_and_attend(layer, *args)

        monkeypatch.setattr(attention, "store_and_attend", broken_attend)
        return
    sessions = llm.engine.sequence_runner
    forward = sessions.forward

    def broken_forward(*arguments: Any, **named: Any) -> Any:
        if where == "before":
            interrupter.count()
        logits = forward(*arguments, **named)
        if where == "after":
            interrupter.count()
        return logits

    monkeypatch.setattr(sessions, "forward", broken_forward)


PLACES = ["before", "between layers", "after"]


@pytest.mark.sampled_cases
@pytest.mark.parametrize("per_layer_kv", [False, True])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")], ids=repr)
def test_interrupted_call_leaves_nothing_behind(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    per_layer_kv: bool,
    error: BaseException,
) -> None:
    llm = small_llm(device, per_layer_kv=per_layer_kv, max_batch_size=3, resident_decode=False)
    for step in (1, 3):  # a prefill step, and a decode step
        interrupt(monkeypatch, llm, where, error, step)
        with pytest.raises(type(error)):
            llm.generate(TEXTS, greedy(), progress=False)
        monkeypatch.undo()
        assert not llm.engine.has_work
        for text, output in zip(TEXTS, llm.generate(TEXTS, greedy(), progress=False), strict=True):
            assert output.token_ids == transformers_continuation(device, text, 16)
        assert not llm.engine.has_work
    assert_no_block_is_lost(llm)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("per_layer_kv", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_stream_survives_an_interrupted_call(
    device: str, monkeypatch: pytest.MonkeyPatch, where: str, per_layer_kv: bool
) -> None:
    llm = small_llm(device, per_layer_kv=per_layer_kv, resident_decode=False)
    with during_a_stream(device, llm):
        interrupt(monkeypatch, llm, where, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS[1], greedy(), progress=False)
        monkeypatch.undo()
    assert_no_block_is_lost(llm)
