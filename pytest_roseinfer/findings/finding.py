"""What an invariant finds wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_roseinfer.findings.location import Location


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, in words."""

    what: str
    location: Location | None = None
    cause: BaseException | None = None
    """What the cache raised."""
