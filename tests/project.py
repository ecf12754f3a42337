"""A fresh project for every test: an empty folder and a pytest that found the plugin installed."""

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
_OUTSIDE = (
    "TRITON_INTERPRET",
    "GITHUB_STEP_SUMMARY",
    "PYTEST_ADDOPTS",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
    "PYTEST_XDIST_TESTRUNUID",
)
"""Variables of the run these tests are part of that theirs must not see."""


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


# Whatever imports one of these fails, as it would where they are not installed.
_WITHOUT_PYTEST = """
import runpy, sys
sys.modules["pytest"] = sys.modules["hypothesis"] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@dataclass
class Project:
    pytester: pytest.Pytester
    monkeypatch: pytest.MonkeyPatch
    from_cold: bool = False
    """Its processes import torch and transformers themselves."""

    @property
    def path(self) -> Path:
        return self.pytester.path

    def write(self, **files: str) -> None:
        """``name=text`` becomes name.py."""
        for name, text in files.items():
            (self.path / f"{name}.py").write_text(dedent(text))

    def copy_caches(self) -> None:
        """Copy the caches beside this file into the project, as a package."""
        shutil.copytree(CACHES, self.path / "caches", ignore=shutil.ignore_patterns("__pycache__"))

    def pretend_gpus(self, *, count: int) -> list[str]:
        """Options of a run in which torch is no more than a claim to have GPUs."""
        self.from_cold = True
        self.write(torch_with_gpus=_TORCH_WITH_GPUS.format(count=count))
        self.monkeypatch.setenv("PYTHONPATH", str(self.path), prepend=os.pathsep)
        return ["-p", "torch_with_gpus", "--roseinfer-gpu"]

    def ini(self, *lines: str) -> None:
        (self.path / "pytest.ini").write_text("\n".join(["[pytest]", *lines]) + "\n")

    def pytest(self, *arguments: str) -> pytest.RunResult:
        """Run pytest in its own process, so that the plugin comes in as it does for a user."""
        arguments = ("-p", "no:cacheprovider", *arguments)
        if self.from_cold:
            return self.pytester.runpytest_subprocess(*arguments)
        folder = tempfile.mkdtemp(prefix="runpytest-", dir=self.path)
        path = os.pathsep.join(filter(None, [str(self.path), os.environ.get("PYTHONPATH")]))
        begin = time.perf_counter()
        done = warm_process.run(
            ["-m", "pytest", f"--basetemp={folder}", *arguments],
            cwd=self.path,
            environment={**os.environ, "HOME": str(self.path), "PYTHONPATH": path},
        )
        seconds = time.perf_counter() - begin
        print(done.stdout, done.stderr)
        lines = done.stdout.splitlines(), done.stderr.splitlines()
        return pytest.RunResult(done.returncode, *lines, seconds)

    def judge_after(self, tries: int) -> None:
        """Let so few examples decide that something is never reached, in a conftest.py."""
        enough = f"coverage.CONCLUSIVE_EXAMPLES = {tries}"
        self.write(conftest=f"from pytest_roseinfer.run import coverage\n\n{enough}\n")

    def saved(self, suffix: str) -> Path:
        """Return the trace, or script, of the only failure."""
        (file,) = (self.path / ".roseinfer").glob(f"*{suffix}")
        return file

    def shown(self, suffix: str) -> Path:
        """Return how a run that was started in the project names it."""
        return self.saved(suffix).relative_to(self.path)

    def run_script(self, file: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _WITHOUT_PYTEST, str(file or self.saved(".py"))],
            cwd=self.path.parent,  # not where the project is
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="session")
def constants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hypothesis keeps the constants of each source here, which take longer to find than a test."""
    return tmp_path_factory.mktemp("constants")


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, constants: Path) -> Project:
    for name in _OUTSIDE:
        monkeypatch.delenv(name, raising=False)
    (pytester.path / ".hypothesis").mkdir()
    (pytester.path / ".hypothesis" / "constants").symlink_to(constants)
    return Project(pytester, monkeypatch)


@pytest.fixture
def short_run() -> Iterator[None]:
    """The searches of a test are as short as it sets them, whatever run it is part of."""
    asked, seen = settings.current(), coverage.current()
    coverage.set_current(coverage.Coverage())
    yield
    settings.set_current(asked)
    coverage.set_current(seen)
