"""The command line finds its commands: its own, and those that are installed."""

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
    """Metadata of an installed roseinfer, to come before any other on a path."""
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


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_help_lists_every_command_and_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = ["torch", "triton", "transformers", "numpy", "pytest", "hypothesis"]
    heavy += ["starlette", "uvicorn", "pydantic", "prometheus_client"]
    path = install(tmp_path, INSTALLED[ENTRY_POINTS])
    *said, answer = run_python(HELP.format(heavy=heavy), PYTHONPATH=path).splitlines()
    assert json.loads(answer) == [0, []]
    listed = [line.split()[0] for line in said if line.startswith("    ")]
    assert listed == ["generate", "gates", "serve", "verify"]


@pytest.mark.usefixtures("installed")
def test_alone_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert generate.HELP in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "roseinfer 0.1.0\n"


def test_a_command_of_another_package_is_run(
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
def test_an_unknown_command_is_told_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "verifi")
    assert "generate" in said
    assert "verify" in said
    assert "pip install" not in said


@pytest.mark.usefixtures("not_installed")
def test_where_nothing_is_installed_it_says_how_to_get_verify(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "pip install . (or -e .)" in refused(capsys, "verify")
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert generate.HELP in said
    assert "pip install . (or -e .)" in said


@pytest.mark.usefixtures("installed")
def test_verify_says_what_its_search_is_known_to_find(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def run_tests(arguments: list[str], plugins: list[object]) -> int:
        asked.extend(arguments)
        assert plugins
        return 1

    monkeypatch.setattr(pytest, "main", run_tests)
    assert main(["verify", "--cpu", "--seed", "5"]) == 1
    assert "--roseinfer-seed=5" in asked
    assert "--roseinfer-gpu" not in asked
    said = capsys.readouterr().out
    assert said.startswith("roseinfer verify: checking RoseinferEngine, GroupedManager, ")
    assert re.search(
        r"\nSearched 0 histories .*, profile dev.\nStrength of .* planted bugs with ", said
    )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--temprature", "0.5"], "--temprature 0.5; did you mean --temperature?"),
        (["verify", "--exmples=5"], "--exmples=5; did you mean --examples?"),
        (["--verzion"], "--verzion; did you mean --version?"),
        (["generate", "--nonsense"], "--nonsense\n"),
        (["verify", "everything"], "unrecognized arguments: everything\n"),
    ],
)
def test_an_unknown_option_is_told_what_was_close(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(capsys, *words)


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "roseinfer", "--help"], capture_output=True, text=True, check=True
    )
    assert generate.HELP in done.stdout
