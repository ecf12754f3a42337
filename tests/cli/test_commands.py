"""Command lookup: commands of roseinfer and of installed packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from roseinfer.cli import ENTRY_POINTS, generate, main
from tests.python_process import ROOT, run_python

if TYPE_CHECKING:
    from pathlib import Path

INSTALLED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
HELP = """
    import json, sys
    from roseinfer.cli import main

    try:
        main(["--help"])
    except SystemExit as ended:
        print(json.dumps([ended.code, [m for m in {heavy} if m in sys.modules]]))
"""


def install(folder: Path, commands: dict[str, str]) -> str:
    """Write metadata of an installed roseinfer; return the folder to put first on a path."""
    metadata = folder / "roseinfer-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: roseinfer\nVersion: 0.1.0\n")
    lines = [f"{name} = {module}" for name, module in commands.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINTS}]", *lines]) + "\n")
    return str(folder)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, INSTALLED[ENTRY_POINTS]))


@pytest.fixture
def not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, {}))


def stderr_of_rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_error:
        main(arguments)
    assert exit_error.value.code == 2
    return capsys.readouterr().err


def test_help_lists_every_command_and_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = ["torch", "triton", "transformers", "numpy", "pytest", "hypothesis"]
    heavy += ["starlette", "uvicorn", "pydantic", "prometheus_client"]
    path = install(tmp_path, INSTALLED[ENTRY_POINTS])
    *output, answer = run_python(HELP.format(heavy=heavy), PYTHONPATH=path).splitlines()
    assert json.loads(answer) == [0, []]
    commands = [line.split()[0] for line in output if line.startswith("    ")]
    assert commands == ["generate", "gates", "serve", "verify"]


@pytest.mark.usefixtures("installed")
def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert generate.HELP in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_error:
        main(["--version"])
    assert exit_error.value.code == 0
    assert capsys.readouterr().out == "roseinfer 0.1.0\n"


def test_command_of_another_package_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "greeting_command.py").write_text(
        "HELP = DESCRIPTION = 'greet'\n"
        "def add_options(parser): parser.add_argument('--name')\n"
        "def run(args): print('Hello', args.name); return 3\n"
    )
    monkeypatch.syspath_prepend(install(tmp_path, {"greet": "greeting_command"}))
    assert main(["greet", "--name", "you"]) == 3
    assert capsys.readouterr().out == "Hello you\n"


@pytest.mark.usefixtures("installed")
def test_unknown_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    output = stderr_of_rejected(capsys, "verifi")
    assert "generate" in output
    assert "verify" in output
    assert "pip install" not in output


@pytest.mark.usefixtures("not_installed")
def test_missing_installation_is_reported_for_verify(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "pip install . (or -e .)" in stderr_of_rejected(capsys, "verify")
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out
    assert generate.HELP in output
    assert "pip install . (or -e .)" in output


@pytest.mark.usefixtures("installed")
def test_verify_reports_the_strength_of_its_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest_arguments: list[str] = []

    def run_tests(arguments: list[str], plugins: list[object]) -> int:
        pytest_arguments.extend(arguments)
        assert plugins
        return 1

    monkeypatch.setattr(pytest, "main", run_tests)
    assert main(["verify", "--cpu", "--seed", "5"]) == 1
    assert "--roseinfer-seed=5" in pytest_arguments
    assert "--roseinfer-gpu" not in pytest_arguments
    output = capsys.readouterr().out
    assert output.startswith("roseinfer verify: checking RoseinferEngine, GroupedManager, ")
    assert re.search(
        r"\nSearched 0 histories .*, profile dev.\nStrength of .* planted bugs with ", output
    )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["generate", "--temprature", "0.5"], "--temprature 0.5; did you mean --temperature?"),
        (["verify", "--exmples=5"], "--exmples=5; did you mean --examples?"),
        (["--verzion"], "--verzion; did you mean --version?"),
        (["generate", "--nonsense"], "--nonsense\n"),
        (["verify", "everything"], "unrecognized arguments: everything\n"),
    ],
)
def test_unknown_option_suggests_a_similar_one(
    capsys: pytest.CaptureFixture[str], arguments: list[str], output: str
) -> None:
    assert output in stderr_of_rejected(capsys, *arguments)


def test_package_runs_as_a_module() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "roseinfer", "--help"], capture_output=True, text=True, check=True
    )
    assert generate.HELP in process.stdout
