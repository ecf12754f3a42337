"""What a step of a GitHub workflow shows, where there is one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def add_to_github_summary(lines: Iterable[str]) -> None:
    if file := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(file, "a", encoding="utf-8") as summary:
            summary.writelines(f"{line}\n" for line in lines)
