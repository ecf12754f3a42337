"""Known findings: digests, the file, and the outcomes of tests and replays."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.findings.known import digest_of, kind_of, read_known
from pytest_roseinfer.settings import KnownFinding
from pytest_roseinfer.words import OptionError
from tests.tutorials.planted_bugs import PLANTED, load
from tests.tutorials.printed import harness_on, list_cache

if TYPE_CHECKING:
    from pathlib import Path

    from tests.project import Project

FOUND = [bug.name for bug in PLANTED if bug.name != "a freed sequence keeps its table"]
"""Planted bugs that the harness finds; without an adapter's help, the last one has no effect."""
SHORT_SEARCH = ("--roseinfer-examples=30", "--roseinfer-seed=1", "-W", "error")
REASON = "rows get the keys of the first"
KNOWN = "known finding {}: rows get the keys of the first (https://example.org/7)"
WRONG_KEYS = list_cache().replace("key[:, i]", "key[:, 0]")
ALSO_WRONG_VALUES = WRONG_KEYS.replace(
    "            self.rows.setdefault",
    "            if self.rows and seq not in self.rows:\n"
    "                new[1] = 0\n"
    "            self.rows.setdefault",
)


def printed_entry(result: pytest.RunResult) -> tuple[str, str]:
    """Return the digest and the lines for the file that a failure prints, with a reason."""
    entry = re.search(
        r"^digest (\w+); a known .*:\n((?:  .*\n){5})", result.stdout.str() + "\n", re.M
    )
    assert entry
    lines = entry[2].replace('reason = ""', f'reason = "{REASON}"')
    return entry[1], lines.replace('link = ""', 'link = "https://example.org/7"')


@pytest.fixture
def known_project(project: Project) -> Project:
    """Return a project whose only defect has an entry."""
    project.write(test_my_cache=WRONG_KEYS)
    result = project.pytest(*SHORT_SEARCH)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    _, lines = printed_entry(result)
    (project.path / "roseinfer-known.toml").write_text(lines)
    return project


def digest_in(project: Project) -> str:
    return (project.path / "roseinfer-known.toml").read_text().strip()[1:11]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=str)
def test_printed_entry_makes_tests_xfail(known_project: Project, workers: list[str]) -> None:
    """The search goes on after a known finding; the seed is another one."""
    reports = ["--roseinfer-report=r.json", "--roseinfer-report=r.html", "--junitxml=r.xml"]
    result = known_project.pytest("-W", "error", "-rx", "--roseinfer-seed=2", *workers, *reports)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(xfailed=3, skipped=2)
    reason = KNOWN.format(digest_in(known_project))
    result.stdout.fnmatch_lines(
        [f"XFAIL: {reason}", f"XFAIL *::test_histories - {reason}"], consecutive=False
    )
    verdict = json.loads((known_project.path / "r.json").read_text())
    assert verdict["passed"]
    assert {(each["digest"], each["known"]) for each in verdict["findings"]} == {
        (digest_in(known_project), reason)
    }
    assert verdict["targets"][0]["histories"] > 10
    assert f"<p>{reason}</p>" in (known_project.path / "r.html").read_text()
    skipped = ElementTree.parse(known_project.path / "r.xml").iter("skipped")
    assert reason in [each.attrib["message"] for each in skipped]


@pytest.mark.slow
def test_another_failure_of_the_same_test_still_fails(known_project: Project) -> None:
    known_project.write(test_my_cache=ALSO_WRONG_VALUES)
    result = known_project.pytest("--roseinfer-seed=2", "-k", "histories")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=1, deselected=4)
    result.stdout.fnmatch_lines(["peek: sequence *, V: position 0, *found zeros"])
    digest, _ = printed_entry(result)
    assert digest != digest_in(known_project)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("strict_key", "ini", "outcome"),
    [
        ("", "", "xpassed"),
        ("", "xfail_strict = true", "failed"),
        ("true", "", "failed"),
        ("false", "xfail_strict = true", "xpassed"),
    ],
)
def test_finding_that_is_gone_is_an_unexpected_pass(
    known_project: Project, strict_key: str, ini: str, outcome: str
) -> None:
    known_project.write(test_my_cache=list_cache())
    if strict_key:
        with (known_project.path / "roseinfer-known.toml").open("a") as file:
            file.write(f"  strict = {strict_key}\n")
    known_project.ini(ini)
    result = known_project.pytest(*SHORT_SEARCH)
    result.assert_outcomes(passed=2, skipped=2, **{outcome: 1})
    assert result.ret == (outcome == "failed")
    reason = KNOWN.format(digest_in(known_project))
    result.stdout.fnmatch_lines([f"XPASS: {reason}; test_histories no longer finds it: *"])
    # Other tests are not expected to find it, nor is a search that ends early.
    others = known_project.pytest(*SHORT_SEARCH, "-k", "permuting")
    others.assert_outcomes(passed=1, deselected=4)
    assert "XPASS" not in others.stdout.str()


@pytest.mark.slow
def test_search_that_ends_early_is_no_unexpected_pass(known_project: Project) -> None:
    known_project.write(test_my_cache=list_cache())
    limit = "--roseinfer-search-seconds=0.001"
    result = known_project.pytest(*SHORT_SEARCH, limit, "-k", "histories", "-W", "default")
    assert "XPASS" not in result.stdout.str()


@pytest.mark.slow
def test_one_defect_may_have_several_digests(known_project: Project) -> None:
    """Entries with one reason and link are one defect, which need not show in all of its ways."""
    file = known_project.path / "roseinfer-known.toml"
    file.write_text(file.read_text() + file.read_text().replace(digest_in(known_project), "0" * 10))
    known_project.pytest(*SHORT_SEARCH).assert_outcomes(xfailed=3, skipped=2)


@pytest.mark.slow
def test_replay_of_a_known_finding(known_project: Project) -> None:
    trace = str(next((known_project.path / ".roseinfer").glob("*.json")))
    replay = ["--roseinfer-replay", trace, "--roseinfer-target", "test_my_cache:ListCache"]
    result = known_project.pytest(*replay)
    assert result.ret == pytest.ExitCode.OK
    reason = KNOWN.format(digest_in(known_project))
    result.stdout.fnmatch_lines(["FAILED: peek: *", f"XFAIL: {reason}"])
    assert known_project.pytest(*replay, "--runxfail").ret == pytest.ExitCode.TESTS_FAILED
    known_project.write(test_my_cache=list_cache())
    result = known_project.pytest(*replay)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["it passed*", f"XPASS: {reason}"])


@pytest.mark.slow
def test_runxfail_reports_known_findings_as_failures(known_project: Project) -> None:
    result = known_project.pytest(*SHORT_SEARCH, "--runxfail", "-k", "histories")
    result.assert_outcomes(failed=1, deselected=4)


# Digests.


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("name", FOUND)
def test_digest_of_a_bug_depends_on_no_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (bug,) = (bug for bug in PLANTED if bug.name == name)
    kinds = set()
    for seed in (3, 4):
        settings.set_current(replace(settings.current(), seed=seed, failures_dir=None))
        with pytest.raises(Difference) as raised:
            harness_on(load(bug.source())).test_histories()
        kinds.add(kind_of(raised.value))
    assert len(kinds) == 1


def test_digest_differs_by_target_and_kind() -> None:
    errors = KeyError("a"), KeyError("b"), IndexError()
    digests = [digest_of("mine:Cache", error) for error in errors]
    assert digests[0] == digests[1] != digests[2]
    assert digest_of("other:Cache", errors[0]) != digests[0]


# The file.


ENTRY = '[0123456789]\ntarget = "m:C"\ntest = "test_histories"\nreason = "why"\n'


def test_entry_is_read(tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    file.write_text(ENTRY + "strict = true\n")
    known = KnownFinding("0123456789", "m:C", "test_histories", "why", strict=True)
    assert read_known(file) == {"0123456789": known}
    assert str(known) == "known finding 0123456789: why"


MISTAKES = {
    "[0123456789": "known.toml: Expected ']' at the end of a table declaration",
    ENTRY + ENTRY: "known.toml: Cannot declare ('0123456789',) twice",
    "[histories]\n": "histories is not a known finding; expected a table such as [0000000000]",
    "0123456789 = 3": "0123456789 is not a known finding",
    ENTRY + 'resaon = "x"': "0123456789 has an unknown key resaon; did you mean reason?",
    ENTRY + 'strict = "yes"': "0123456789.strict must be a bool",
    ENTRY.replace("why", ""): "0123456789 has no reason",
    "[0123456789]": "0123456789 has no target and no test and no reason",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_invalid_file_is_named_with_its_mistake(tmp_path: Path, text: str) -> None:
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(OptionError, match=re.escape(MISTAKES[text])):
        read_known(tmp_path / "known.toml")


def test_missing_or_invalid_file_is_a_usage_error(project: Project) -> None:
    project.write(test_my_cache=list_cache())
    project.ini("roseinfer_known_findings = gone.toml")
    result = project.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *gone.toml: No such file or directory"])
    entry = ENTRY.replace("m:C", "test_my_cache:ListCache").replace("_histories", "_history")
    (project.path / "here.toml").write_text(entry)
    result = project.pytest("--roseinfer-known-findings=here.toml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: known finding 0123456789: *ListCache has no test test_history; did you mean *?"]
    )
