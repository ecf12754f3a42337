"""The code and the output that pages of the documentation print."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

DOCS = Path(__file__).resolve().parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(page: str, heading: str = "", language: str = "") -> list[str]:
    """List the blocks in this language, under a heading or of a whole page."""
    if heading:
        found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
        assert found, heading
        page = found[1]
    every = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    return [code for own, code in every if own == language]


def list_cache() -> str:
    """Return the test file with which the tutorial begins."""
    (code,) = blocks(page("tutorial.md"), "Ten lines", "python")
    return code


def adapter_of_paged_kv() -> str:
    """Return the test file of the tutorial for a cache that one brings along."""
    (code,) = blocks(page("tutorial.md"), "Bring your own", "python")
    return code


def with_any_numbers(shown: str) -> list[str]:
    """Leave open what differs from run to run: seeds, seconds and counts."""
    changing = re.compile(r"(?<=seed )\d+$|(?<= in )\d+(?= s,)|(?<=make |pend |peek )\d+")
    return [changing.sub("*", line) for line in shown.splitlines()]


def anywhere(output: str) -> str:
    """Take out of the names of files what differs from run to run."""
    return re.sub(r"(\.roseinfer/\w+)-\w{10}\.", r"\1-N.", output)


def harness_on(library: Any) -> Any:
    """Return the tutorial's tests of a cache, for a module in place of ``paged_kv``."""
    there: dict[str, Any] = {"__name__": "test_paged_kv"}
    with patch.dict(sys.modules, paged_kv=library):
        exec(adapter_of_paged_kv(), there)
    return there["TestPaged"]()
