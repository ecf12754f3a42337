"""A fast path of a cache or an engine, as its adapter declares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FastPath:
    """A fast path: what it must equal, and when it can and cannot run.

    A setting is given as in ``{"fused": True, "min_batch": 1}``, with switches of
    ``option_choices``. It applies if every switch it names has that value.
    """

    equals: str
    """The slow path whose results it must reproduce, by its name in ``path_counts``."""
    runs_with: Sequence[Mapping[str, Any]] = ()
    """Settings under each of which it can run, so that histories can aim at it. None are needed
    where the first choice of every switch will do."""
    never_with: Sequence[Mapping[str, Any]] = ()
    """Settings any one of which keeps it from running; if it is counted under one, it fails."""
    device: str | None = None
    """The only kind of device it can run on, such as ``"cuda"``; None where any will do."""
    share: float = 1.0
    """How many examples aim at it for each that aims at another path; less where they take long."""
    one_position: bool = False
    """It can only write when all rows go to the same position of a block."""

    def __post_init__(self) -> None:
        if not isinstance(self.equals, str):
            raise TypeError(f"equals={self.equals!r}: expected the name of a slow path")
        for name in ("runs_with", "never_with"):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                raise TypeError(f"{name}={given!r}: expected several settings, as in [{given!r}]")

        if not self.share > 0:
            raise TypeError(f"share={self.share!r}: expected a number above 0")

    def runs_on(self, device: str) -> bool:
        return self.device in (None, device.partition(":")[0])

    def can_run(self, options: Mapping[str, Any], device: str) -> bool:
        """Return True if neither the device nor these switches keep it from running."""

        def applies(setting: Mapping[str, Any]) -> bool:
            return setting.items() <= options.items()

        allowed = not self.runs_with or any(map(applies, self.runs_with))
        return allowed and self.runs_on(device) and not any(map(applies, self.never_with))
