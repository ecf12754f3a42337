"""Code and output that pages of the documentation print."""

from __future__ import annotations

import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

DOCS = Path(__file__).resolve().parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(page: str, heading: str = "", language: str = "") -> list[str]:
    """Return the code blocks in a language, under a heading or on a whole page."""
    if heading:
        match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
        assert match, heading
        page = match[1]
    all_blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    return [code for block_language, code in all_blocks if block_language == language]


def list_cache() -> str:
    """Return the first test file of the tutorial."""
    (code,) = blocks(page("tutorials/cache.md"), "Ten lines", "python")
    return code


def adapter_of_paged_kv() -> str:
    """Return the tutorial's test file for a user's own cache."""
    (code,) = blocks(page("tutorials/cache.md"), "Bring your own", "python")
    return code


def tutorial_engine() -> str:
    """Return the tutorial's test file for an engine."""
    tutorial = page("tutorials/engine.md")
    parts = (blocks(tutorial, part, "python") for part in ("The engine", "The adapter"))
    return "\n\n\n".join(chain.from_iterable(parts))


def with_any_numbers(output: str) -> list[str]:
    """Replace figures that differ between runs: seeds, seconds and counts."""
    varying = re.compile(r"(?<=seed )\d+$|(?<= in )\d+(?= s,)|(?<=make |pend |peek )\d+")
    return [varying.sub("*", line) for line in output.splitlines()]


def anywhere(output: str) -> str:
    """Replace the parts of file names that differ between runs."""
    return re.sub(r"(\.roseinfer/\w+)-\w{10}\.", r"\1-N.", output)


def harness_on(library: Any) -> Any:
    """Return the tutorial's tests of a cache, for a module in place of ``paged_kv``."""
    namespace: dict[str, Any] = {"__name__": "test_paged_kv"}
    with patch.dict(sys.modules, paged_kv=library):
        exec(adapter_of_paged_kv(), namespace)
    return namespace["TestPaged"]()
