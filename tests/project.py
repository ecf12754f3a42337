"""Fresh project for a test: an empty folder, and runs of pytest with the plugin installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.run import coverage
from tests import warm_process

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHES = Path(__file__).parent / "capabilities" / "caches"
_OUTER_VARIABLES = (
    "TRITON_INTERPRET",
    "GITHUB_STEP_SUMMARY",
    "PYTEST_ADDOPTS",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
    "PYTEST_XDIST_TESTRUNUID",
)
"""Variables of the outer test run that are hidden from runs in a project."""


_TORCH_WITH_GPUS = """
    import sys
    from importlib.machinery import ModuleSpec
    from types import ModuleType, SimpleNamespace

    torch = sys.modules["torch"] = ModuleType("torch")
    torch.__spec__ = ModuleSpec("torch", None)
    torch.cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: {count},
        get_device_name=lambda index: "Imaginary GPU",
    )
"""


# Imports of pytest and hypothesis fail here, as where they were not installed.
_WITHOUT_PYTEST = """
import runpy, sys
sys.modules["pytest"] = sys.modules["hypothesis"] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@dataclass
class Project:
    pytester: pytest.Pytester
    monkeypatch: pytest.MonkeyPatch
    cold_start: bool = False
    """True if its processes import torch and transformers themselves."""

    @property
    def path(self) -> Path:
        return self.pytester.path

    def write(self, **files: str) -> None:
        """Write each ``name=text`` to name.py."""
        for name, text in files.items():
            (self.path / f"{name}.py").write_text(dedent(text))

    def copy_caches(self) -> None:
        """Copy the caches of the capabilities' tests into the project, as a package."""
        shutil.copytree(CACHES, self.path / "caches", ignore=shutil.ignore_patterns("__pycache__"))

    def pretend_gpus(self, *, count: int) -> list[str]:
        """Return options of a run with a fake torch that reports GPUs."""
        self.cold_start = True
        self.write(torch_with_gpus=_TORCH_WITH_GPUS.format(count=count))
        self.monkeypatch.setenv("PYTHONPATH", str(self.path), prepend=os.pathsep)
        return ["-p", "torch_with_gpus", "--roseinfer-gpu"]

    def ini(self, *lines: str) -> None:
        (self.path / "pytest.ini").write_text("\n".join(["[pytest]", *lines]) + "\n")

    def pytest(self, *arguments: str) -> pytest.RunResult:
        """Run pytest in a process of its own, where the plugin is loaded as for a user."""
        arguments = ("-p", "no:cacheprovider", *arguments)
        if self.cold_start:
            return self.pytester.runpytest_subprocess(*arguments)
        folder = tempfile.mkdtemp(prefix="runpytest-", dir=self.path)
        path = os.pathsep.join(filter(None, [str(self.path), os.environ.get("PYTHONPATH")]))
        begin = time.perf_counter()
        process = warm_process.run(
            ["-m", "pytest", f"--basetemp={folder}", *arguments],
            cwd=self.path,
            environment={**os.environ, "HOME": str(self.path), "PYTHONPATH": path},
        )
        seconds = time.perf_counter() - begin
        print(process.stdout, process.stderr)
        lines = process.stdout.splitlines(), process.stderr.splitlines()
        return pytest.RunResult(process.returncode, *lines, seconds)

    def set_conclusive_examples(self, count: int) -> None:
        """Write a conftest.py that sets after how many examples a path counts as never reached."""
        statement = f"coverage.CONCLUSIVE_EXAMPLES = {count}"
        self.write(conftest=f"from pytest_roseinfer.run import coverage\n\n{statement}\n")

    def failure_file(self, suffix: str) -> Path:
        """Return the trace or script of the only saved failure, by its suffix."""
        (file,) = (self.path / ".roseinfer").glob(f"*{suffix}")
        return file

    def failure_name(self, suffix: str) -> Path:
        """Return the same path as a run in the project prints it."""
        return self.failure_file(suffix).relative_to(self.path)

    def run_script(self, file: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _WITHOUT_PYTEST, str(file or self.failure_file(".py"))],
            cwd=self.path.parent,  # outside of the project
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="session")
def constants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the constants that Hypothesis finds in sources, which takes long."""
    return tmp_path_factory.mktemp("constants")


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, constants: Path) -> Project:
    for name in _OUTER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (pytester.path / ".hypothesis").mkdir()
    (pytester.path / ".hypothesis" / "constants").symlink_to(constants)
    return Project(pytester, monkeypatch)


@pytest.fixture
def short_run() -> Iterator[None]:
    """Let the enclosing run after a test change settings and coverage without effects on others."""
    saved_settings, saved_coverage = settings.current(), coverage.current()
    coverage.set_current(coverage.Coverage())
    yield
    settings.set_current(saved_settings)
    coverage.set_current(saved_coverage)
