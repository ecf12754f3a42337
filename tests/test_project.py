"""The promises the project makes about itself: its commands, its files, its typing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "roseinfer",
    "pytest_roseinfer",
    "tests",
    "docs",
    "LICENSE",
}


def readme_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block.strip() for block in blocks]


def test_readme_has_one_command_to_verify_and_one_to_test() -> None:
    verify, test = readme_commands()
    assert verify.endswith("roseinfer verify")
    assert "pytest" in test


def test_the_files_of_the_short_run_are_there() -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / "README.md").read_text())
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert readme_commands()[1] in lines


def test_the_workflow_runs_what_ci_runs() -> None:
    assert "run: .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_nothing_else_lies_at_the_top_level() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    tops = {path.split("/")[0] for path in tracked.stdout.splitlines()}
    assert {top for top in tops if not top.startswith(".")} == TOP_LEVEL


@pytest.mark.parametrize("package", ["roseinfer", "pytest_roseinfer"])
def test_packages_ship_their_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "torch.Size([4, 21, 64])" in capsys.readouterr().out


@pytest.mark.parametrize("package", ["roseinfer", "pytest_roseinfer"])
def test_the_layout_names_every_room(package: str) -> None:
    layout = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [f"{each.parent.name}/" for each in (ROOT / package).glob("*/__init__.py")]
    files = [file.name for file in (ROOT / package).glob("*.py") if "__" not in file.name]
    assert rooms
    missing = [name for name in rooms + files if not re.search(rf"^ .*\b{name}", layout, re.M)]
    assert not missing


def test_every_constraint_is_exact() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert any(pin.startswith("torch==") for pin in pins)
    assert [pin for pin in pins if not re.match(r"^[\w.-]+==[\w.]+(; .*)?$", pin)] == []


def test_an_upper_bound_names_the_break_it_is_for() -> None:
    """Else it keeps people with a newer version out for nothing."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    requirements = [line for line in lines if re.match(r' +"[\w.-]+ *[<>=!~]', line)]
    assert any("torch>=" in line for line in requirements)
    assert [
        line for line in requirements if re.search(r"<|==\d|~=", line) and "#" not in line
    ] == []
