"""Pages of the documentation with sections that a command writes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class NoPage(ValueError):
    """A file that is not a page of the command."""


def put_section(file: Path, name: str, body: str) -> None:
    """Replace one section of the page; raise where it has none of the name."""
    found = _find(file, name)
    text = found.string
    file.write_text(text[: found.start()] + body + text[found.end() :], encoding="utf-8")


def read_section(file: Path, name: str) -> str:
    """Return one section of the page; raise where it has none of the name."""
    return _find(file, name)[0]


def has_section(file: Path, name: str) -> bool:
    """Return True if the page has a section of the name."""
    return bool(_section(name).search(_read(file)))


def _find(file: Path, name: str) -> re.Match[str]:
    found = _section(name).search(_read(file))
    if not found:
        raise NoPage(f"{file} has no section {name}: it is no page of this command")
    return found


def _section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise NoPage(f"{file} cannot be read: {error}") from None
