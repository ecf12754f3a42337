"""What an adapter declares of one of its cache's fast paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FastPath:
    """A fast path: what it must equal, and when it can and cannot run.

    Settings of switches are given as in ``{"fused": True, "min_batch": 1}``: it is one if
    every switch it names has that value. Switches are those of ``option_choices``.
    """

    equals: str
    """The slow path whose results it must reproduce, by its name in ``path_counts``."""
    runs_with: Sequence[Mapping[str, Any]] = ()
    """Settings, under each of which it can run, so that histories can aim at it. None are
    needed where the first choice of every switch will do."""
    never_with: Sequence[Mapping[str, Any]] = ()
    """Settings, any one of which keeps it from running; counted all the same, it fails."""
    device: str | None = None
    """The only kind of device it can run on, as ``"cuda"``; None where any will do."""
    one_position: bool = False
    """It can only write when all rows go to the same position of a block."""

    def __post_init__(self) -> None:
        if not isinstance(self.equals, str):
            raise TypeError(f"equals={self.equals!r}: expected the name of a slow path")
        for name in ("runs_with", "never_with"):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                raise TypeError(f"{name}={given!r}: expected several settings, as in [{given!r}]")

    def runs_on(self, device: str) -> bool:
        return self.device in (None, device.partition(":")[0])
