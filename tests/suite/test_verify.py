"""``roseinfer verify`` takes the options that pytest has too, and refuses mistakes at once."""

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
    project.ini("addopts = --no-such-option")  # for other tests, as is the conftest.py
    (project.path / "tests").mkdir()
    (project.path / "tests" / "conftest.py").write_text("raise RuntimeError")
    asked = ["--target=caches.list_cache:ListCache", "--seed=5", "--examples=3", "--profile=ci"]
    done = warm_process.run(
        ["-m", "roseinfer", "verify", "--cpu", *asked, "--report=kv.json", "--report=kv.html"],
        cwd=project.path,
        environment={**os.environ, "PYTEST_ADDOPTS": "-p no:xdist"},
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("roseinfer verify: checking ListCache\n")
    assert "\nSKIPPED [1]" in done.stdout
    assert "ListCache has no option_choices" in done.stdout
    looked, finds = done.stdout.splitlines()[-2:]
    assert re.fullmatch(
        r"Searched [1-9]\d* histories and mixes of requests in \d+ s, profile ci.", looked
    )
    assert finds == "Strength of such a search: not measured: 3 examples in place of 500."
    assert (project.path / "kv.html").is_file()
    report = json.loads((project.path / "kv.json").read_text())
    (target,) = report["targets"]
    said = (report["profile"], report["seed"], report["examples"], report["steps"])
    assert said == ("ci", 5, 3, 20)
    assert target["name"] == "caches.list_cache:ListCache"


def test_the_time_of_a_search_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[str] = []

    def run(arguments: list[str], **_: object) -> int:
        handed.extend(arguments)
        return 5

    monkeypatch.setattr(pytest, "main", run)
    assert main(["verify", "--cpu", "--search-seconds=60.5"]) == 5
    assert "--roseinfer-search-seconds=60.5" in handed


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_is_a_usage_error(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", argument]) == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ERROR: ")
    assert MISTAKES[argument] in said.err


def test_a_mistake_is_refused_before_anything_heavy_is_imported() -> None:
    said = run_python(
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
    assert said == "[]\n"
