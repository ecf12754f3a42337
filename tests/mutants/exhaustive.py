"""Search for planted bugs of the cache by running every short history.

``python -m tests.mutants.exhaustive STEPS [NAME ...]``; without names, all bugs in the cache.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mutants.catalogue import CATALOGUE
from tests.mutants.forking import in_child
from tests.mutants.install import import_from, plant
from tests.mutants.mutant import MANAGERS, Mutant

KERNELS_OFF = {"triton": False}
SHORTEST = 3


def bugs_in_the_cache() -> list[Mutant]:
    """Return the bugs in code that the walk runs, which excludes kernels."""
    excluded = ("roseinfer.kernels.", "roseinfer.attention.")
    return [
        mutant
        for mutant in CATALOGUE
        if set(mutant.targets) & set(MANAGERS) and not mutant.module.startswith(excluded)
    ]


def walk_on(mutant: Mutant | None, most: int) -> str:
    """Return the number of steps that find a bug; "" if ``most`` steps do not."""
    with tempfile.TemporaryDirectory() as folder:
        plant(mutant, Path(folder))
        ended = in_child(lambda: _steps_to_find(mutant, Path(folder), most))
    return ended.answer or ended.ended_by


def _steps_to_find(mutant: Mutant | None, copy: Path, most: int) -> str:
    import_from(copy)
    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.adapters.load_target import load_target
    from pytest_roseinfer.findings.divergence import Divergence
    from pytest_roseinfer.suite.exhaustive import WalkCounts, empty_histories, walk

    targets = [name for name in MANAGERS if mutant is None or name in mutant.targets]
    for steps in range(min(SHORTEST, most), most + 1):
        for name in targets:
            adapter = load_target(name)
            assert issubclass(adapter, KVCacheAdapter)
            for first_history in empty_histories(adapter, KERNELS_OFF):
                try:
                    for _ in walk(adapter, first_history, steps, WalkCounts()):
                        pass
                except Divergence as divergence:
                    return str(divergence.history.size)
    return ""


def main() -> None:
    most, *names = sys.argv[1:]
    for mutant in bugs_in_the_cache():
        if not names or mutant.name in names:
            steps = walk_on(mutant, int(most))
            print(f"{mutant.name}: {f'{steps} steps' if steps else 'not found'}", flush=True)


if __name__ == "__main__":
    import pytest_roseinfer.suite.exhaustive  # noqa: F401  (imported once, for all children)

    main()
