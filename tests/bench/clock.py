"""Clock that advances only in steps and sleeps, so that the times of a run are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.bench import cases, driver

if TYPE_CHECKING:
    import pytest

    from roseinfer import LLM
    from roseinfer.engine.engine import Update


class Clock:
    """Replacement of the module ``time`` in code that drives and times runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_steps_take_a_second(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    step = llm.engine.step

    def timed_step() -> list[Update]:
        updates = step()
        clock.now += 1.0
        return updates

    monkeypatch.setattr(llm.engine, "step", timed_step)
    for module in (cases, driver):
        monkeypatch.setattr(module, "time", clock)
    return clock
