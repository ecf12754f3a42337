"""Form of the pages of docs/findings: what each defect has, and what the index says of it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.others.fetch import FOLDER, PROJECTS
from tests.others.found_scripts import PAGES

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIELD = r"^- \*\*{}\*\*:((?:.|\n)*?)(?=\n- \*\*|\n\n)"
_VERSION = re.compile(r" (\d+\.\d|at [0-9a-f]{7})")
_CITATION = re.compile(r"`([\w./-]+\.(?:py|cu|md)):(\d+)`")
_QUOTATION = re.compile(r'"([^"]+)"\s+\(`([\w./-]+):(\d+)`\)')
_LINES_OF_QUOTATION = 4
_INDEX = (PAGES / "index.md").read_text(encoding="utf-8")
_README = (PAGES.parents[1] / "README.md").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Defect:
    page: str
    """Name of its page."""
    heading: str
    """Title of its page, which names the project and its version."""
    text: str
    """Its section of the page, from its title on."""
    found_by: str
    """What the index says of that."""

    @property
    def project(self) -> str:
        return self.heading.removeprefix("# ").partition(" ")[0].lower()

    def field(self, name: str) -> str:
        found = re.search(_FIELD.format(name), self.text, re.MULTILINE)
        return " ".join(found[1].split()) if found else ""

    @property
    def promise(self) -> str:
        return self.field("Promise") + self.field("Expected")


def _section(page: str, title: str) -> str:
    text = (PAGES / page).read_text(encoding="utf-8")
    section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return f"{title}\n{section}" if section else ""


def _defects() -> dict[str, Defect]:
    """Return the defects that the index lists, by their titles."""
    pages = dict(re.findall(r"^\[(.+)\]:\n  ([\w-]+\.md)#", _INDEX, re.MULTILINE))
    rows = re.findall(r"^\| \[(.+)\] \| .+ \| (.+) \|$", _INDEX, re.MULTILINE)
    headings = {name: (PAGES / name).read_text(encoding="utf-8") for name in pages.values()}
    return {
        title: Defect(
            pages[title],
            headings[pages[title]].partition("\n")[0],
            _section(pages[title], title),
            found_by,
        )
        for title, found_by in rows
    }


DEFECTS = _defects()

defects = pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)


@defects
def test_defect_has_its_parts(defect: Defect) -> None:
    assert defect.text, "the index links to no section"
    assert _VERSION.search(defect.heading), "the page's title has no version"
    for name in ("Smallest case", "Found", "Found by", "Upstream"):
        assert defect.field(name), f"it has no line {name!r}"
    assert _CITATION.search(defect.promise), "its promise has no file and line"
    assert re.search(r"```python\n.*?```\n.*?```text\n", defect.text, re.DOTALL), "it has no script"


@defects
def test_index_says_how_it_was_found(defect: Defect) -> None:
    by_search = defect.field("Found by").startswith("the harness")
    assert by_search == (defect.found_by == "search")
    if "![" in defect.text:
        assert "the harness" in defect.field("Found by"), "it has a picture of another failure"


@pytest.mark.parametrize("page", sorted({each.page for each in DEFECTS.values()}))
def test_index_lists_each_defect_of_a_page(page: str) -> None:
    sections = (PAGES / page).read_text(encoding="utf-8").split("\n## ")[1:]
    titles = [each.partition("\n")[0] for each in sections if "\n- **Smallest case**" in each]
    assert titles == [title for title, defect in DEFECTS.items() if defect.page == page]


def test_index_counts_the_defects() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| .+ \| (\d+) \| (\d+) \|$", _INDEX, re.MULTILINE)
    numbers = {name.lower(): (int(all_), int(found)) for name, all_, found in rows}
    every = Counter(each.project for each in DEFECTS.values())
    by_search = Counter(each.project for each in DEFECTS.values() if each.found_by == "search")
    assert numbers == {name: (every[name], by_search[name]) for name in every}
    pictures = Counter(each.found_by == "search" for each in DEFECTS.values() if "![" in each.text)
    without = len(DEFECTS) - pictures.total()
    for words in (
        f"{len(DEFECTS)} defects in",
        f"{by_search.total()} of them by search",
        f"{pictures.total()} have a picture",
        f"{pictures[True]} of its smallest failures",
        f"{pictures[False]} of examples written by hand",
        f"the other {without} have none",
    ):
        assert words in " ".join(_INDEX.split())


def test_readme_counts_the_defects() -> None:
    table = re.search(r"^\| (transformers .+) \|\n.+\n\| (.+) \|$", _README, re.MULTILINE)
    assert table
    *names, last = table[1].lower().split(" | ")
    *numbers, others = map(int, table[2].split(" | "))
    every = Counter(each.project for each in DEFECTS.values())
    assert numbers == [every[name] for name in names]
    assert (last, others) == ("others", every.total() - sum(numbers))


@defects
def test_cited_lines_say_what_is_quoted(defect: Defect) -> None:
    """Files are those of the version that the page's title names."""
    folder = _sources(defect)
    for name, line in _CITATION.findall(defect.text):
        assert _lines(folder, name, int(line)).strip(), f"{name} has no line {line}"
    for quotation, name, line in _QUOTATION.findall(defect.text):
        source = _lines(folder, name, int(line), _LINES_OF_QUOTATION)
        assert _words(quotation) in _words(source), f"{name}:{line} does not say {quotation!r}"


def _sources(defect: Defect) -> Path:
    project, _, release = defect.heading.removeprefix("# ").lower().partition(" ")
    if project == "transformers":
        spec = find_spec(project)
        if not spec or not spec.origin or version(project) != release.partition(":")[0]:
            pytest.skip(f"{project} {release} is not installed")
        return Path(spec.origin).parent
    if project not in PROJECTS or not (FOLDER / project).exists():
        pytest.skip(f"{project} is not downloaded: python -m tests.others.fetch")
    return FOLDER / project


def _lines(folder: Path, name: str, line: int, count: int = 1) -> str:
    """Return lines of the files with this name, which may lack their first folders."""
    files = [each for each in _files(folder)[Path(name).name] if str(each).endswith(f"/{name}")]
    assert files, f"{folder} has no {name}"
    texts = (each.read_text(encoding="utf-8").splitlines() for each in files)
    return "\n".join("\n".join(text[line - 1 : line - 1 + count]) for text in texts)


@cache
def _files(folder: Path) -> Mapping[str, list[Path]]:
    """Return the files below a folder, by their names without folders."""
    files = defaultdict(list)
    for file in sorted(folder.rglob("*.*")):
        files[file.name].append(file)
    return files


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
