"""Reports: JSON, HTML, JUnit, and the summary on GitHub."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from pytest_roseinfer.environment import distribution_of
from pytest_roseinfer.report.coverage_gate import in_brief
from pytest_roseinfer.report.html import page, plot
from pytest_roseinfer.report.verdict import (
    TargetVerdict,
    Verdict,
    problems_of,
    searches_of,
    verdict,
)
from pytest_roseinfer.run.coverage import (
    CONCLUSIVE_EXAMPLES,
    Coverage,
    TargetCoverage,
    possible_batches,
)
from pytest_roseinfer.settings import Settings
from tests.capabilities.caches.paged_cache import PagedCache

if TYPE_CHECKING:
    from pathlib import Path

    from tests.project import Project

NEVER_REACHED = (
    f"path 'faster' was never reached, by none of {CONCLUSIVE_EXAMPLES} histories that could reach "
    "it: "
    "a check that did not run is not a pass"
)


def example() -> Verdict:
    """Return a verdict with one path never reached, of a cache with a name to escape."""
    target = TargetCoverage({"fast": "slow", "faster": "slow"}, ["a<b", "rare"], searched=True)
    for _ in range(40):
        target.note({"fast": 1, "a<b": 2})
    target.note({"slow": 3, "rare": 1})
    target.histories, target.seconds = 41, 2.4
    target.eligible_examples["faster"] = CONCLUSIVE_EXAMPLES
    search_coverage = Coverage()
    search_coverage._targets["mine.caches:Box<int>"] = target
    run_settings = Settings(seed=9)
    problems = problems_of(search_coverage, require_paths=True)
    return verdict(search_coverage, run_settings, problems, passed=False)


def test_summary_of_a_failed_run_names_the_failure(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.copy_caches()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "summary.md"))
    result = project.pytest(
        *("--pyargs", "pytest_roseinfer.suite", "-k", "histories", "--roseinfer-seed=1"),
        "--roseinfer-target=caches.broken_caches:SwapsRows",
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    summary = (project.path / "summary.md").read_text()
    assert "- **failed**: peek: sequence 0, layer 0, K: " in summary


def test_every_requested_report_is_written(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.copy_caches()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "summary.md"))
    (project.path / "summary.md").write_text("# from an earlier step\n")
    result = project.pytest(
        *("-v", "--pyargs", "pytest_roseinfer.suite", "-k", "histories"),
        "--roseinfer-target=caches.paged_cache:PagedCache",
        *("--roseinfer-seed=2", "--roseinfer-examples=25"),
        *("--roseinfer-report=out/reached.json", "--roseinfer-report=out/reached.html"),
        "--junitxml=junit.xml",
    )
    assert result.ret == pytest.ExitCode.OK
    data = json.loads((project.path / "out/reached.json").read_text())
    (target,) = data["targets"]
    times = {row["name"]: row["times"] for row in target["rows"]}
    assert data["passed"]
    assert (data["seed"], data["examples"]) == (2, 25)
    assert data["device"] == "cpu (Triton interpreted)"
    assert target["name"] == "caches.paged_cache:PagedCache"
    assert target["histories"] == 25
    assert target["kind"] == "cache"
    assert min(target["tested"][name] for name in ("make", "append", "peek", "table")) >= 25
    assert target["not_offered"][:2] == ["gather", "gather_first"]
    assert times.keys() == {"all_rows", "new_block"}
    assert min(times.values()) > 3
    checked = target["checked"]
    assert checked["read_back"] == checked["arena"] == checked["counts"] > 25
    assert checked["attention"] == checked["bad_calls"] == 0  # the cache offers neither
    assert 0 < target["together"]["all_rows"]["new_block"] < target["times"]["all_rows"]

    assert "caches.paged_cache:PagedCache" in (project.path / "out/reached.html").read_text()
    assert junit_properties(project) == {
        f"roseinfer.caches.paged_cache:PagedCache.{name}": str(count)
        for name, count in times.items()
    }
    summary = (project.path / "summary.md").read_text()
    assert summary.startswith("# from an earlier step\n### roseinfer: `caches.paged_cache:Paged")
    checked_words = ", ".join(f"{name} {count}" for name, count in checked.items() if count)
    assert f"\nchecked: {checked_words}\n" in summary
    assert checked_words in (project.path / "out/reached.html").read_text()
    result.stdout.fnmatch_lines([f"checked: {checked_words}"])
    batches = ", ".join(f"{kind} {count}" for kind, count in target["batches"].items())
    assert target["batches"].keys() == {*possible_batches(PagedCache)}
    assert min(target["batches"].values()) > 3
    assert f"\nbatches: {batches}\n" in summary
    assert batches in (project.path / "out/reached.html").read_text()
    result.stdout.fnmatch_lines([f"batches: {batches}"])
    (row,) = [line for line in summary.splitlines() if line.startswith("| path")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["path", "all_rows", "row_by_row", str(times["all_rows"]), "equal"]


def junit_properties(project: Project) -> dict[str, str]:
    tree = ElementTree.parse(project.path / "junit.xml")
    properties = {node.attrib["name"]: node.attrib["value"] for node in tree.iter("property")}
    return {name: value for name, value in properties.items() if name.startswith("roseinfer.")}


def test_unwritable_report_fails_the_run(project: Project) -> None:
    project.write(test_plain="def test_plain(): pass")
    (project.path / "taken").write_text("")
    result = project.pytest("--roseinfer-report=taken/out.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED: --roseinfer-report *taken/out.json: *"])


def test_json_report_gives_the_reason_of_a_failed_run() -> None:
    data: dict[str, Any] = json.loads(json.dumps(example()))
    (target,) = data["targets"]
    assert not data["passed"]
    assert target["problems"][0] == NEVER_REACHED
    assert "condition 'rare' was reached 1 time" in target["warnings"][0]
    assert [row["verdict"] for row in target["rows"]] == [
        "equal",
        "NOT REACHED",
        "met",
        "too rarely",
    ]


# ------------------------------------------------------------------------------------- HTML


class Reader(HTMLParser):
    """Records requests and tags of a page, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.requests: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.requests += [str(value) for name, value in attrs if name in ("src", "href", "data")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_report_is_self_contained() -> None:
    reader = Reader()
    text = page(example(), {}, {})
    reader.feed(text)
    assert reader.open == []
    assert reader.requests == []
    assert not reader.tags & {"link", "img", "iframe"}
    assert "url(" not in text
    assert "@import" not in text


def test_html_report_names_a_failed_check() -> None:
    data = example()
    assert "a check failed" not in page(data, {}, {})
    data["targets"][0]["failed"] = True
    assert "41 histories in 2 s; a check failed, see above" in page(data, {}, {})


def test_html_report_lists_methods_of_an_engine_once() -> None:
    target = TargetCoverage({}, [], ["make", "step"], ["forked"], "engine", searched=True)
    target.method_calls.update(make=3, step=40)
    target.histories = 3
    search_coverage = Coverage()
    search_coverage._targets["mine:Engine"] = target
    data = verdict(search_coverage, Settings(seed=9), {}, passed=True)
    assert data["targets"][0]["tested"] == {"make": 3, "step": 40}
    text = page(data, {}, {})
    assert "<td>3 mixes of requests in 0 s</td>" in text
    assert text.count("step 40") == text.count("make 3") == text.count("forked") == 1
    assert searches_of(target.kind) == "mixes of requests"


def test_html_report_includes_figures_of_gates() -> None:
    text = page(example(), {}, {"steps < 1 ms": "<svg></svg>"})
    assert "<h2>steps &lt; 1 ms</h2><figure><svg></svg></figure>" in text


def test_html_report_shows_and_escapes_the_data() -> None:
    text = page(example(), {}, {})
    assert "Box&lt;int&gt;" in text
    assert "Box<int>" not in text
    assert f"FAILED: {NEVER_REACHED}" in unescape(text)
    assert 'class="badge bad">failed' in text
    passed = page({**example(), "passed": True, "targets": []}, {}, {})
    assert 'class="badge good">passed' in passed
    assert "No cache or engine was tested in this run." in passed


def test_plot_has_a_cell_for_every_path_and_condition() -> None:
    (target,) = example()["targets"]
    cells = re.findall(
        r"<title>([^<]*)</title><rect[^>]*class=\"(\w+)\" fill-opacity=\"([\d.]+)\"", plot(target)
    )
    shades = {title: (kind, float(shade)) for title, kind, shade in cells}
    assert len(cells) == len(shades) == 3 * 3  # for each path its count and two conditions
    assert shades["fast ran 40"] == ("cell", 1.0)
    assert shades["fast while a&lt;b: steps 40"] == ("cell", 1.0)
    assert shades["faster ran 0"] == ("empty", 0.0)
    assert shades["fast while rare: steps 0"] == ("empty", 0.0)
    # The scale is logarithmic, so that a single step is visible.
    assert 0.2 < shades["slow while rare: steps 1"][1] < shades["slow ran 3"][1] < 1


def test_plot_is_well_formed() -> None:
    (target,) = example()["targets"]
    ElementTree.fromstring(plot(target))


def test_distribution_of_a_target_is_found_by_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A distribution's name may differ; a module of no distribution has none."""
    (tmp_path / "lonely_cache.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert re.fullmatch(r"PyYAML [\d.]+", distribution_of("yaml:Loader"))
    assert distribution_of("lonely_cache:Cache") == ""
    assert distribution_of("no_such_package:Cache") == ""


def test_brief_summary_names_what_was_not_reached() -> None:
    target = TargetCoverage({"fast": "slow", "faster": "slow"}, ["rare"], ["make"], ["fork"])
    target.searched, target.histories = True, 5
    target.note({"fast": 4, "rare": 3})
    counted = "tested 1 of 2 methods, 0 invariants, "
    brief = f"{counted}1 of 2 paths equal (not faster), 1 of 1 condition met; -v lists them"
    assert in_brief(TargetVerdict(target)) == brief
    target.note_failure()
    not_judged = f"{counted}paths and conditions not judged; -v lists them"
    assert in_brief(TargetVerdict(target)) == not_judged
