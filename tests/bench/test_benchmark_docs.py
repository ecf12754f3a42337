"""Commands and options on docs/how-to/benchmarks.md."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.bench import charts, command
from roseinfer.bench.__main__ import main as bench
from roseinfer.bench.cases import PEERS
from roseinfer.bench.command import benchmark_scheduler, benchmark_streaming
from roseinfer.bench.ladder import rungs
from roseinfer.cli.model_options import option_names
from roseinfer.config import EngineConfig
from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE = (ROOT / "docs" / "how-to" / "benchmarks.md").read_text()
(LINES,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "roseinfer.benchmark_scheduler": benchmark_scheduler,
    "roseinfer.benchmark_streaming": benchmark_streaming,
    "roseinfer.bench": bench,
}


@pytest.mark.parametrize("line", LINES.splitlines())
def test_documented_commands_parse(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring and drawing are replaced."""
    calls: list[Any] = []
    monkeypatch.chdir(tmp_path)
    for name in ("ladder", "peers", "trace", "start", "attention", "speculation", "endpoint"):
        monkeypatch.setattr(command, f"_{name}", calls.append)
    for name in ("_schedule", "_stream"):
        monkeypatch.setattr(command, name, calls.append)
    monkeypatch.setattr(charts, "redraw", lambda *args: calls.append(args))
    python, dash_m, module_name, *arguments = shlex.split(line)
    assert (python, dash_m) == ("python", "-m")
    assert COMMANDS[module_name](arguments) == 0
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (benchmark_scheduler, []),
        (benchmark_streaming, []),
        (bench, ["ladder"]),
        (bench, ["peers"]),
        (bench, ["trace"]),
        (bench, ["start"]),
        (bench, ["attention"]),
        (bench, ["speculation"]),
        (bench, ["endpoint"]),
    ],
    ids=[
        "scheduler",
        "streaming",
        "ladder",
        "peers",
        "trace",
        "start",
        "attention",
        "speculation",
        "server",
    ],
)
def test_page_names_every_option(
    main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+[a-z]", capsys.readouterr().out)) - {"--help"}
    assert len(options) >= 5
    shared = [option_names(each) for each in fields(EngineConfig) if each.metadata]
    options -= {name.replace("--", sign, 1) for name in chain(*shared) for sign in ("--", "--no-")}
    assert {option for option in options if not re.search(rf"{option}\b", PAGE)} == set()


def test_page_names_every_rung_and_peer() -> None:
    for name in [rung.name.partition(" of ")[0] for rung in rungs(4)]:
        assert f"| {name} |" in PAGE
    assert all(f"\n- `{peer}`: " in PAGE for peer in PEERS)
