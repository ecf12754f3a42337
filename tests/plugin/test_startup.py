"""Startup: the plugin costs little in pytest runs that do not use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.project import Project

HEAVY = {"torch", "triton", "transformers", "numpy", "hypothesis", "tabulate", "tokenizers"}
ALLOWED = {
    "pytest_roseinfer",
    "pytest_roseinfer.gates",
    "pytest_roseinfer.gates.gate",
    "pytest_roseinfer.plugin",
    "pytest_roseinfer.plugin.fixtures",
    "pytest_roseinfer.plugin.markers",
    "pytest_roseinfer.plugin.options",
    "pytest_roseinfer.plugin.hooks",
    "pytest_roseinfer.words",
    "pytest_roseinfer.settings",
}
# Hypothesis's own plugin imports Hypothesis at the end of every run; roseinfer's must not.
WITHOUT_HYPOTHESIS = ("-p", "no:hypothesispytest")
PROBE = """
    import json, sys

    def pytest_unconfigure():
        with open("modules.json", "w") as file:
            json.dump(sorted(sys.modules), file)
"""
COUNTING = """
import sys

calls = 0

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.setprofile(count)
import pytest
ended = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", sys.argv[1]])
sys.setprofile(None)
print(int(ended), calls)
"""
MAX_CALLS = 20_000


def loaded_modules(project: Project, *arguments: str) -> set[str]:
    result = project.pytest("-p", "probe", *WITHOUT_HYPOTHESIS, *arguments)
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return set(json.loads((project.path / "modules.json").read_text()))


@pytest.fixture
def probed_project(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    project.write(probe=PROBE)
    project.cold_start = True
    monkeypatch.setenv("PYTHONPATH", str(project.path), prepend=os.pathsep)
    return project


def test_plugin_imports_only_its_own_modules(probed_project: Project) -> None:
    """The plugin adds only its own modules, in an empty project and in one with a test."""
    for arguments in [("--collect-only",), ("test_plain.py",)]:
        extra = loaded_modules(probed_project, *arguments) - loaded_modules(
            probed_project, *arguments, "-p", "no:roseinfer"
        )
        assert extra == ALLOWED
        probed_project.write(test_plain="def test_plain(tmp_path): pass")


def test_list_of_fixtures_imports_nothing_heavy(probed_project: Project) -> None:
    assert not HEAVY & loaded_modules(probed_project, "--fixtures")


def test_configured_project_imports_nothing_heavy(probed_project: Project) -> None:
    """Every run reads the ini file, and most runs are for other tests."""
    probed_project.ini("roseinfer_targets = mine:Cache", "roseinfer_profile = ci")
    probed_project.write(test_plain="def test_plain(): pass")
    assert not HEAVY & loaded_modules(probed_project)


def test_plugin_adds_at_most_20000_calls(project: Project, tmp_path: Path) -> None:
    """Calls are counted, as times of a busy machine vary: on an idle one they took 10 ms."""
    project.write(no_plugin="")
    calls = Collection(project.path, tmp_path / "bytecode").calls
    for _ in range(2):  # the first run compiles the modules
        calls_without, calls_with = calls("no_plugin"), calls("pytest_roseinfer.plugin")
    assert 0 < calls_with - calls_without <= MAX_CALLS


@dataclass(frozen=True)
class Collection:
    """A run of ``pytest --collect-only`` without tests, with one given plugin.

    A plugin is always given: for ``-p`` pytest reads the entry points of every installed
    distribution, which takes longer than some plugins.
    """

    folder: Path
    bytecode: Path
    """Folder of compiled modules, as an installation has them."""

    def calls(self, plugin: str) -> int:
        """Return the number of called functions, including those in C."""
        environment = os.environ | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(self.folder),
            "PYTHONPYCACHEPREFIX": str(self.bytecode),
        }
        process = subprocess.run(
            [sys.executable, "-c", COUNTING, plugin],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        status, calls = map(int, process.stdout.split()[-2:])
        assert status == pytest.ExitCode.NO_TESTS_COLLECTED
        return calls
