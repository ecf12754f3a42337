"""A history after which there is something to misuse in every way that the catalogue knows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.history import History
from pytest_roseinfer.cases.operations.sequences.fork import Fork
from pytest_roseinfer.cases.operations.sequences.free import Free
from pytest_roseinfer.cases.operations.writes.append import Append

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from pytest_roseinfer.adapters.cache import CacheSpec
    from pytest_roseinfer.cases.operations.operation import Operation


def busy_history(spec: CacheSpec, can: AbstractSet[str]) -> History:
    """Fork, free and append in a cache with room, as far as the cache can.

    The newest sequence has a partial block of its own.
    """
    steps: list[Operation] = [Append((0, 1)), Fork(0, 2), Free(1), Append((0, 3)), Append((3,))]
    room = replace(spec, num_blocks=max(8, spec.num_blocks), block_size=max(3, spec.block_size))
    return History(room, tuple(step for step in steps if step.needs <= can))
