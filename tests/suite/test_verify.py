"""``roseinfer verify``: its options, which equal pytest's, and its usage errors."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest

from roseinfer.cli import main
from tests import warm_process
from tests.python_process import run_python

if TYPE_CHECKING:
    from tests.project import Project

MISTAKES = {
    "--profile=deev": "--profile deev: choose one of dev, ci, nightly; did you mean dev?",
    "--examples=0": "--examples 0: must be at least 1",
    "--seed=-1": "--seed -1: must be at least 0",
    "--search-seconds=-1": "--search-seconds -1: must be at least 0",
    "--report=kv.txt": "--report kv.txt: the name must end in .json or .html",
    "--target=Cache": "'Cache' is not a target: expected package.module:Class",
    "--target=no.where:Cache": "no.where:Cache: there is no module no.where",
    "--target=pytest_roseinfer.targets.roseinfer_kw:Cache": "did you mean "
    "pytest_roseinfer.targets.roseinfer_kv?",
    "--target=pytest_roseinfer.targets.dynamic_cache:DynamicCachAdapter": "has no "
    "DynamicCachAdapter; did you mean DynamicCacheAdapter?",
    "--exhaustive=no.where:Cache": "no.where:Cache: there is no module no.where",
}


def test_every_option_has_an_effect(project: Project) -> None:
    project.copy_caches()
    project.ini("addopts = --no-such-option")  # must be ignored, like conftest.py
    (project.path / "tests").mkdir()
    (project.path / "tests" / "conftest.py").write_text("raise RuntimeError")
    options = ["--target=caches.list_cache:ListCache", "--seed=5", "--examples=3", "--profile=ci"]
    process = warm_process.run(
        ["-m", "roseinfer", "verify", "--cpu", *options, "--report=kv.json", "--report=kv.html"],
        cwd=project.path,
        environment={**os.environ, "PYTEST_ADDOPTS": "-p no:xdist"},
    )
    assert process.returncode == 0, process.stdout
    assert process.stdout.startswith("roseinfer verify: checking ListCache\n")
    assert "\nSKIPPED [1]" in process.stdout
    assert "ListCache has no option_choices" in process.stdout
    search_line, strength_line = process.stdout.splitlines()[-2:]
    assert re.fullmatch(
        r"Searched [1-9]\d* histories and mixes of requests in \d+ s, profile ci.", search_line
    )
    assert strength_line == "Strength of such a search: not measured: 3 examples in place of 500."
    assert (project.path / "kv.html").is_file()
    report = json.loads((project.path / "kv.json").read_text())
    (target,) = report["targets"]
    figures = (report["profile"], report["seed"], report["examples"], report["steps"])
    assert figures == ("ci", 5, 3, 20)
    assert target["name"] == "caches.list_cache:ListCache"


def test_time_limit_of_a_search_is_passed_to_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest_arguments: list[str] = []

    def run(arguments: list[str], **_: object) -> int:
        pytest_arguments.extend(arguments)
        return 5

    monkeypatch.setattr(pytest, "main", run)
    assert main(["verify", "--cpu", "--search-seconds=60.5"]) == 5
    assert "--roseinfer-search-seconds=60.5" in pytest_arguments


@pytest.mark.parametrize("argument", MISTAKES)
def test_invalid_option_is_a_usage_error(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", argument]) == 4
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("ERROR: ")
    assert MISTAKES[argument] in output.err


def test_invalid_option_is_refused_before_heavy_imports() -> None:
    output = run_python(
        """
        import sys
        from argparse import ArgumentParser
        from pytest_roseinfer.suite import verify

        parser = ArgumentParser()
        verify.add_options(parser)
        typo = "pytest_roseinfer.targets.roseinfer_kv:GroupedManger"
        for mistake in (
            *("--profile=deev", "--examples=0", "--report=kv.txt"),
            *("--target=no.where:Cache", f"--target={typo}", f"--exhaustive={typo}"),
        ):
            assert verify.run(parser.parse_args([mistake])) == 4
        print([name for name in ("torch", "pytest", "hypothesis") if name in sys.modules])
        """
    )
    assert output == "[]\n"
