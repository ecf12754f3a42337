"""Kept failures: traces in a folder of the project, replayed before each search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer import settings
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.run import coverage
from pytest_roseinfer.search import trace as traces
from pytest_roseinfer.search.named_checks import CHECKS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.search.named_checks import Example


def replay_kept(adapter: type[Adapter], files: Sequence[Path]) -> None:
    """Replay the kept failures of an adapter on this run's device; raise the first that fails."""
    run_settings = settings.current()
    for file in run_settings.part.share_of(files):
        trace = traces.read(str(file))
        device = traces.device_of(trace).partition(":")[0]
        of_run = run_settings.device.partition(":")[0]
        if trace["adapter"] == coverage.name_of(adapter) and device == of_run:
            _replay(adapter, file, traces.example_of(str(file), trace, adapter), trace["check"])


def _replay(adapter: type[Adapter], file: Path, example: Example, check: str) -> None:
    from hypothesis.strategies import just

    from pytest_roseinfer.search.search import Search

    def run(example: Example) -> None:
        CHECKS[check](adapter, example)

    try:
        Search(adapter, run, just(example), 1, check, salt=f"kept {file.name}").run()
    except Difference as failure:
        kept = f"{file.parent.name}/{file.name}"
        failure.extra_paragraphs.append(f"It is a kept failure: {kept} replays it in every run.")
        raise
