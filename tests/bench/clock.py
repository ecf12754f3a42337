"""A clock that moves only in steps and sleeps, so that a run's times are known beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.bench import cases, driver

if TYPE_CHECKING:
    import pytest

    from roseinfer import LLM
    from roseinfer.engine.engine import Update


class Clock:
    """Replaces the module ``time`` where a run is driven and timed."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def every_step_takes_a_second(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    step = llm.engine.step

    def timed() -> list[Update]:
        updates = step()
        clock.now += 1.0
        return updates

    monkeypatch.setattr(llm.engine, "step", timed)
    for module in (cases, driver):
        monkeypatch.setattr(module, "time", clock)
    return clock
