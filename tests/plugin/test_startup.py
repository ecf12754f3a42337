"""The plugin is in every pytest run, so where nothing uses it, it costs next to nothing."""

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
# Hypothesis's own plugin imports Hypothesis at the end of every run; ours must not.
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
MOST_CALLS = 20_000


def loaded(project: Project, *arguments: str) -> set[str]:
    result = project.pytest("-p", "probe", *WITHOUT_HYPOTHESIS, *arguments)
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return set(json.loads((project.path / "modules.json").read_text()))


@pytest.fixture
def probed(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    project.write(probe=PROBE)
    project.from_cold = True
    monkeypatch.setenv("PYTHONPATH", str(project.path), prepend=os.pathsep)
    return project


def test_it_imports_nothing_but_itself(probed: Project) -> None:
    """No more modules are imported than without it, in an empty project and in one with a test."""
    for arguments in [("--collect-only",), ("test_plain.py",)]:
        extra = loaded(probed, *arguments) - loaded(probed, *arguments, "-p", "no:roseinfer")
        assert extra == ALLOWED
        probed.write(test_plain="def test_plain(tmp_path): pass")


def test_its_help_and_fixtures_import_nothing_heavy(probed: Project) -> None:
    assert not HEAVY & loaded(probed, "--fixtures")


def test_a_project_that_is_configured_for_it_imports_nothing_heavy(probed: Project) -> None:
    """Every run has its ini file, and most runs are about other tests."""
    probed.ini("roseinfer_targets = mine:Cache", "roseinfer_profile = ci")
    probed.write(test_plain="def test_plain(): pass")
    assert not HEAVY & loaded(probed)


def test_it_adds_at_most_20000_calls(project: Project, tmp_path: Path) -> None:
    """Calls are counted, since seconds of a busy machine say little: these took it 10 ms alone."""
    project.write(no_plugin="")
    calls = Collection(project.path, tmp_path / "bytecode").calls
    for _ in range(2):  # the first time compiles the modules
        without, with_it = calls("no_plugin"), calls("pytest_roseinfer.plugin")
    assert 0 < with_it - without <= MOST_CALLS


@dataclass(frozen=True)
class Collection:
    """Run ``pytest --collect-only`` where there is no test, only with the plugin it is given.

    It is always given one: for ``-p`` pytest reads what every installed distribution offers, and
    that takes longer than some plugins.
    """

    folder: Path
    bytecode: Path
    """Where this run compiles to, as an installation has its modules compiled."""

    def calls(self, plugin: str) -> int:
        """Return how many functions were called, those that are written in C too."""
        environment = os.environ | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": str(self.folder),
            "PYTHONPYCACHEPREFIX": str(self.bytecode),
        }
        ran = subprocess.run(
            [sys.executable, "-c", COUNTING, plugin],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        ended, calls = map(int, ran.stdout.split()[-2:])
        assert ended == pytest.ExitCode.NO_TESTS_COLLECTED
        return calls
