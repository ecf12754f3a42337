"""Pages of the documentation with sections that a command writes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class NoPage(ValueError):
    """A file that is not a page of the command."""


def put_section(file: Path, name: str, body: str) -> None:
    """Replace one section of the page."""
    text, pattern = _find(file, name)
    file.write_text(pattern.sub(lambda _: body, text, count=1))


def read_section(file: Path, name: str) -> str:
    """Return one section of the page, and raise where there is none."""
    text, pattern = _find(file, name)
    body: str = pattern.findall(text)[0]
    return body


def _find(file: Path, name: str) -> tuple[str, re.Pattern[str]]:
    """Return the page, and the pattern of one of its sections."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise NoPage(f"{file} cannot be read: {error}") from None
    pattern = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise NoPage(f"{file} has no section {name}: it is no page of this command")
    return text, pattern
