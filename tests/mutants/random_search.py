"""Search loop of the random baselines."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.mutants.hunt import Failure, Stop, guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.mutants.tally import Tally


def search_at_random(
    targets: Sequence[type[Any]],
    draw: Callable[[random.Random, type[Any]], Any],
    check: Callable[[type[Any], Any], object],
    *,
    seed: int,
    operations: int,
    tally: Tally,
) -> Failure | None:
    """Check random examples of the targets until one fails or ``operations`` are reached."""
    rng = random.Random(seed)
    try:
        while tally.operations < operations:
            target = rng.choice(targets)
            example = draw(rng, target)
            with guarded(tally, example.size):
                check(target, example)
    except Stop as stop:
        return Failure(tally.check, stop.message)
    return None
