"""Which of many like tests run where there is little time; a job of the workflow runs them all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_ONE_OF = 4


def every_test() -> bool:
    return bool(os.environ.get("EVERY_TEST"))


def sampled(names: Iterable[str]) -> list[str]:
    """Return one of every few names, or all of them where ``EVERY_TEST`` is set."""
    return [*names][:: 1 if every_test() else _ONE_OF]
