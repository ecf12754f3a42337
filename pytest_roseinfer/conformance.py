"""The tests every cache gets, as a class made for it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as seeded
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import coverage, reproduce, settings
from pytest_roseinfer.adapter import KVCacheAdapter, abilities
from pytest_roseinfer.divergence import Divergence
from pytest_roseinfer.machine import run_history
from pytest_roseinfer.metamorphic import (
    check_copied,
    check_every_option,
    check_permuted,
    check_split,
)
from pytest_roseinfer.strategies import histories

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_roseinfer.history import History


def search(
    adapter: type[KVCacheAdapter],
    check: Callable[[History], None],
    *,
    share: float = 1.0,
    aim: str | None = None,
) -> None:
    """Look for a history on which ``check`` fails; ``share`` is the part of the examples.

    With ``aim``, histories start with the switches that path needs.

    A fresh function is handed to Hypothesis for every search, since it rejects one that
    runs as a method of two classes.
    """
    asked = settings.current()

    def attempt(history: History) -> None:
        check(history)

    attempt.__qualname__ = f"{check.__qualname__}[{adapter.__module__}:{adapter.__qualname__}]"
    drawn = histories(adapter, most_steps=asked.steps, device=asked.device, aim=aim)
    test = given(drawn)(attempt)
    test = hypothesis_settings(
        max_examples=max(1, int(asked.examples * share)),
        # A step under Triton's interpreter takes as long as its launch is large.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        report_multiple_bugs=False,
        print_blob=False,
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    )(test)
    if asked.seed is not None:
        # Searches of one run must not all draw the same histories.
        test = seeded(f"{asked.seed} {attempt.__qualname__} {aim}")(test)
    try:
        with _one_thread():
            test()
    except Divergence as failure:
        coverage.current().of(adapter).failed = True
        raise _with_replay(adapter, failure) from failure.__cause__


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread: tensors this small only wait for the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _with_replay(adapter: type[KVCacheAdapter], failure: Divergence) -> Divergence:
    folder = settings.current().failures_dir
    if folder is not None:
        trace, script = reproduce.save(adapter, failure.history, str(failure), folder)
        failure.args = (
            f"{failure}\n\nreplay with: pytest --roseinfer-replay {trace}\n"
            f"         or: python {script}",
        )
    return failure


class ConformanceTests:
    """What ``conformance(Adapter)`` returns a subclass of."""

    adapter: ClassVar[type[KVCacheAdapter]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if hasattr(ConformanceTests, name) and name.startswith("test_"):
                _check_override(name, value)

    def test_histories(self) -> None:
        """Any history leaves the cache as the oracle says, after every step."""
        target = coverage.current().of(self.adapter)

        def check(history: History) -> None:
            target.counts.update(run_history(self.adapter, history))
            target.histories += 1

        aims: list[str | None] = [*self.adapter.paths] or [None]
        for aim in aims:
            search(self.adapter, check, share=1 / len(aims), aim=aim)

    def test_permuting_a_batch_permutes_the_result(self) -> None:
        search(self.adapter, lambda history: check_permuted(self.adapter, history), share=0.2)

    def test_one_batch_equals_its_split_in_two(self) -> None:
        search(self.adapter, lambda history: check_split(self.adapter, history), share=0.2)

    def test_fork_then_append_equals_copy_then_append(self) -> None:
        self._need("fork")
        search(self.adapter, lambda history: check_copied(self.adapter, history), share=0.2)

    def test_every_option_ends_in_the_same_bits(self) -> None:
        if not self.adapter.option_choices:
            pytest.skip(f"{self.adapter.__name__} has no option_choices")
        search(self.adapter, lambda history: check_every_option(self.adapter, history), share=0.1)

    def _need(self, ability: str) -> None:
        if ability not in abilities(self.adapter):
            pytest.skip(f"{self.adapter.__name__} does not offer {ability}()")


def conformance(adapter: type[KVCacheAdapter]) -> type[ConformanceTests]:
    """A test class for one adapter: ``TestMyCache = conformance(MyCache)``."""
    if not (isinstance(adapter, type) and issubclass(adapter, KVCacheAdapter)):
        raise TypeError(f"conformance() takes a subclass of KVCacheAdapter, not {adapter!r}")
    missing = [
        name
        for name in ("make", "append", "peek")
        if getattr(adapter, name) is getattr(KVCacheAdapter, name)
    ]
    if missing:
        raise TypeError(f"{adapter.__name__} must define {', '.join(missing)}")
    settings.choose_kernel_runtime()
    return type(f"Test{adapter.__name__}", (ConformanceTests,), {"adapter": adapter})


def _check_override(name: str, value: object) -> None:
    """Refuse a shipped test that was replaced, unless it is only marked as failing."""
    marks = getattr(value, "pytestmark", [])
    excused = [mark for mark in marks if mark.name == "xfail" and mark.kwargs.get("reason")]
    if not excused:
        raise TypeError(
            f"{name} is a test of pytest_roseinfer and cannot be replaced. If the cache is known "
            "to fail it, mark it: @pytest.mark.xfail(reason=...)"
        )
