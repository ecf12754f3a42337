"""The plugin is in every pytest run, so where nothing uses it, it costs next to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugin.conftest import Project

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
    "pytest_roseinfer.mistakes",
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
MOST_MILLISECONDS = 20


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


def test_it_adds_at_most_20_milliseconds(project: Project, tmp_path: Path) -> None:
    """Runs with it and without follow on each other, and the median pair says what it adds.

    Where five pairs leave a doubt, more are run before it counts: other work on the machine makes
    single runs slower by more than is looked for, the fastest of many too.
    """
    collect = Collection(project.path, tmp_path / "bytecode").seconds
    pairs: list[float] = []
    for pair in range(60):
        seconds: dict[bool, float] = {}
        for plugin in (True, False) if pair % 2 else (False, True):
            seconds[plugin] = collect(["-p", "pytest_roseinfer.plugin"] if plugin else [])
        pairs.append(1000 * (seconds[True] - seconds[False]))
        added = median(pairs)
        if pair >= 4 and added <= MOST_MILLISECONDS:
            break
    assert added <= MOST_MILLISECONDS, f"{added:.1f} ms more, after {len(pairs)} pairs of runs"


@dataclass(frozen=True)
class Collection:
    """Run ``pytest --collect-only`` in an empty folder, only with the plugins it is given."""

    folder: Path
    bytecode: Path
    """Where this run compiles to, as an installation has its modules compiled."""

    def seconds(self, arguments: list[str]) -> float:
        """Return seconds of the processor, not of the clock."""
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        environment = os.environ | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(self.bytecode),
        }
        process = subprocess.Popen(
            [*command, *arguments], cwd=self.folder, env=environment, stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
        return usage.ru_utime + usage.ru_stime
