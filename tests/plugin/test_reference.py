"""Pages of docs/reference name everything that exists, and nothing else."""

from __future__ import annotations

import argparse
import inspect
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

import pytest_roseinfer
import roseinfer
from pytest_roseinfer import (
    AuxiliaryVector,
    BadCall,
    BlockManagerAdapter,
    CacheSpec,
    FastPath,
    KVCacheAdapter,
    Ledger,
    PagedKernelsAdapter,
    ShardedAdapter,
    Tolerance,
)
from pytest_roseinfer.capabilities.misuse import catalogue
from pytest_roseinfer.engines import strategies as engine_strategies
from pytest_roseinfer.findings.frame import Frame
from pytest_roseinfer.findings.timeline import FindingRecord, RequestTimeline
from pytest_roseinfer.gates import gates_command, history
from pytest_roseinfer.gates.history import RunFigures
from pytest_roseinfer.gates.step_work import GROUPS, NOTHING, PYTHON, TORCH
from pytest_roseinfer.gates.timing_report import TimedComparison, entry_of
from pytest_roseinfer.gates.worker import TARGET_KEYS
from pytest_roseinfer.histories import strategies
from pytest_roseinfer.plugin import fixtures, markers, options, reference
from pytest_roseinfer.plugin.reference import read_section
from pytest_roseinfer.report.verdict import FORMAT, Target, Verdict
from pytest_roseinfer.settings import PROFILES
from pytest_roseinfer.suite import verify
from tests.gates.history.runs import run
from tests.gates.simulated import compare, quiet

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = dict.fromkeys(reference.shipped_sections(), DOCS / "reference" / "harness.md") | {
    "options": DOCS / "reference" / "options.md",
    **dict.fromkeys(
        ("capabilities", "engine capabilities"), DOCS / "explanation" / "architecture.md"
    ),
}
"""Page of each generated list."""
REFERENCE = "\n".join(
    (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("options", "harness", "files")
)


def section(heading: str) -> str:
    """Return the text under a heading, up to the next one."""
    match = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", REFERENCE, re.M | re.S)
    assert match, f"no heading {heading!r}"
    return match[1]


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table under a heading; names lose their backticks."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [[re.sub(r"^`([^`]*)`$", r"\1", cell) for cell in row] for row in rows[2:]]


def notes(heading: str) -> dict[str, str]:
    """Return the names of the list under a heading, each with its note in brackets.

    An entry is "- `name`: text" or "- `name` (note): text".
    """
    entries = [
        " ".join(each.split()) for each in re.split(r"^- (?=`)", section(heading), flags=re.M)
    ]
    matches = [re.match(r"`([^`]+)`(?: \((.*?)\))?: \S", each) for each in entries[1:]]
    assert all(matches), entries
    notes_by_name = [(each[1], each[2] or "") for each in matches if each]
    assert len(dict(notes_by_name)) == len(notes_by_name), f"a name twice under {heading!r}"
    return dict(notes_by_name)


def names(heading: str) -> list[str]:
    return list(notes(heading))


@dataclass
class Recorder:
    """Stands in for pytest's parser, and records the options added to it."""

    options: list[str] = field(default_factory=list)
    ini: dict[str, str] = field(default_factory=dict)

    def getgroup(self, *_: str) -> Recorder:
        return self

    def addoption(self, name: str, **_: Any) -> None:
        self.options.append(name)

    def addini(self, name: str, words: str, **_: Any) -> None:
        self.ini[words.removeprefix("see ")] = name


@pytest.fixture
def recorded_options() -> Recorder:
    recorder = Recorder()
    options.add(recorder)  # type: ignore[arg-type]
    return recorder


_SECTIONS = reference.shipped_sections()


@pytest.mark.parametrize("name", _SECTIONS)
def test_generated_lists_equal_the_code(name: str) -> None:
    page = GENERATED[name]
    stale = f"{page.name} is stale in its {name}: run {reference.COMMAND}"
    assert read_section(page, name) == _SECTIONS[name], stale


def test_every_entry_has_a_description() -> None:
    for name, entries in _SECTIONS.items():
        for entry in re.split(r"^ *- ", entries, flags=re.M)[1:]:
            assert re.search(r":\s\S", entry), f"no description among the {name}: {entry}"


def test_ini_options_equal_command_line_options(recorded_options: Recorder) -> None:
    assert {each.usage.split()[0]: each.ini for each in options.entries()} == {
        name: recorded_options.ini.get(name, "") for name in recorded_options.options
    }
    assert set(recorded_options.ini) <= set(recorded_options.options)


def test_profiles_are_documented() -> None:
    documented = {name: tuple(numbers) for name, *numbers, _ in table("Profiles")}
    expected = {
        name: (str(each.examples), str(each.steps), _describe_limit(each.further_seconds))
        for name, each in PROFILES.items()
    }
    assert documented == expected


def _describe_limit(seconds: float) -> str:
    return "unlimited" if seconds == math.inf else f"{seconds:g}"


def test_markers_are_documented() -> None:
    assert names("Markers") == [line.partition(": ")[0] for line in markers.LINES]


def test_fixtures_are_documented() -> None:
    documented = notes("Fixtures")
    definitions = re.findall(r"@pytest\.fixture(.*)\ndef (\w+)", inspect.getsource(fixtures))
    expected = {
        name: "session" if "session" in scope else "function" for scope, name in definitions
    }
    assert documented == expected


@pytest.mark.parametrize(
    ("heading", "module"), [("Strategies", strategies), ("Engine strategies", engine_strategies)]
)
def test_strategies_are_documented(heading: str, module: Any) -> None:
    assert set(names(heading)) == {*module.__all__}


@pytest.mark.parametrize("package", [pytest_roseinfer, roseinfer], ids=lambda each: each.__name__)
def test_public_names_are_documented(package: Any) -> None:
    page = (DOCS / "reference" / f"{package.__name__}.md").read_text(encoding="utf-8")
    documented = re.findall(rf"^\.\. auto\w+:: {package.__name__}\.(\w+)$", page, re.M)
    assert sorted(documented) == package.__all__


def test_standard_bad_calls_are_documented() -> None:
    assert names("Standard bad calls") == list(catalogue(KVCacheAdapter))


@pytest.mark.parametrize("kind", [CacheSpec, FastPath, Ledger, BadCall, Tolerance, AuxiliaryVector])
def test_fields_are_documented(kind: Any) -> None:
    assert names(kind.__name__) == [each.name for each in fields(kind)]


def test_block_manager_adapter_is_documented() -> None:
    (attribute, *methods) = names("BlockManagerAdapter")
    assert attribute == "spare_blocks"
    assert BlockManagerAdapter.spare_blocks == 0
    check_signatures(BlockManagerAdapter, methods)


def test_paged_kernels_adapter_is_documented() -> None:
    check_signatures(PagedKernelsAdapter, names("PagedKernelsAdapter"))


def check_signatures(kind: type, methods: list[str]) -> None:
    for method in methods:
        name, _, signature = method.partition("(")
        parameters = inspect.signature(getattr(kind, name)).parameters
        assert ["self", *signature.rstrip(")").split(", ")] == list(parameters)


def test_sharded_adapter_is_documented() -> None:
    assert names("ShardedAdapter") == [*inspect.get_annotations(ShardedAdapter), "rank(at)"]
    assert list(inspect.signature(ShardedAdapter.rank).parameters) == ["self", "at"]


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("JSON report", Verdict),
        ("JSON finding", FindingRecord),
        ("JSON frame", Frame),
        ("JSON request", RequestTimeline),
        ("JSON target", Target),
    ],
)
def test_json_reports_are_documented(heading: str, kind: Any) -> None:
    assert names(heading) == list(inspect.get_annotations(kind))
    assert f"\n- `format`: {FORMAT}; " in REFERENCE


def test_comparison_records_are_documented() -> None:
    comparison = compare(quiet(), 1.0)
    record = entry_of(TimedComparison("test", "there", comparison, 0.02))
    assert names("Kept comparison") == list(record)
    assert names("Kept side") == list(record["here"])


def test_recorded_runs_are_documented() -> None:
    assert names("Kept run") == [each.name for each in fields(RunFigures)]
    assert f"\n- `format`: {history.FORMAT}.\n" in REFERENCE
    assert names("Kept work") == list(run(1).work[0])


def test_gates_command_is_documented() -> None:
    parser = argparse.ArgumentParser()
    gates_command.add_options(parser)
    assert re.findall(r"^    (\w+) ", parser.format_help(), re.M) == names("roseinfer gates")


def test_return_value_of_a_timed_function_is_documented() -> None:
    assert set(names("What a timed function returns")) == TARGET_KEYS


def test_options_of_verify_are_documented() -> None:
    parser = argparse.ArgumentParser()
    verify.add_options(parser)
    expected = re.findall(r"^  (?:-\w, )?(--[\w-]+)", parser.format_help(), re.M)
    assert sorted(names("roseinfer verify")) == sorted(set(expected) - {"--help"})


def test_groups_of_counts_are_documented() -> None:
    versions = {PYTHON: "Python's minor version", TORCH: "torch", NOTHING: "any version"}
    documented = list(notes("Baselines of work").items())
    assert documented == [(name, versions[group.depends_on]) for name, group in GROUPS.items()]


def test_pages_name_only_existing_options_and_fixtures(recorded_options: Recorder) -> None:
    modules = {file.stem for file in (ROOT / "pytest_roseinfer" / "targets").glob("*.py")}
    known_names = {
        *recorded_options.options,
        *recorded_options.ini.values(),
        *names("Fixtures"),
        *names("Markers"),
        *modules,
    }
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    pages = {*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "CHANGELOG.md"}  # has old names
    for page in [ROOT / "README.md", *sorted(pages), *workflows]:
        names_on_page = re.findall(
            r"--roseinfer-[\w-]+|\broseinfer_\w+", page.read_text(encoding="utf-8")
        )
        assert set(names_on_page) <= known_names, page.name


def test_sections_of_a_page_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Mine\n\n<!-- conditions -->\nold\n<!-- end -->\n\nThe end.\n")
    monkeypatch.setattr("sys.argv", ["reference", str(page)])
    assert reference.main() == ""
    conditions = reference.shipped_sections()["conditions"]
    assert (
        page.read_text() == f"# Mine\n\n<!-- conditions -->\n{conditions}<!-- end -->\n\nThe end.\n"
    )


@pytest.mark.slow
def test_lists_of_another_adapter_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tests.capabilities.test_capability:PinningCache"
    monkeypatch.setattr("sys.argv", ["reference", "--adapter", name])
    assert reference.main() == ""
    output = capsys.readouterr().out
    assert "- `pin(seq, pin)` (needs `free`, `table`): " in output
    name = "tests.engine_capabilities.test_capability:BiasedEngine"
    monkeypatch.setattr("sys.argv", ["reference", "--adapter", name])
    assert reference.main() == ""
    output = capsys.readouterr().out
    assert "- `logit_bias` (default `()`): Pairs of a token and" in output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["README.md"],
            "README.md: no section options; add its markers, or name a page that has them",
        ),
        (["none.md"], "none.md cannot be read"),
        (["--adapter", "nowhere:Cache"], "nowhere"),
    ],
)
def test_errors_of_the_reference_command_are_reported(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["reference", *arguments])
    assert problem in reference.main()
