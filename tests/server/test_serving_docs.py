"""docs/serving.md: its example runs, and its tables say what the code does."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from roseinfer.config import API_KEY, ServerConfig
from roseinfer.server import serve
from roseinfer.server.generation import _CHUNKS_A_SECOND, _MOST_TO_A_CHUNK
from tests.python_process import ROOT

if TYPE_CHECKING:
    from tests.server.served import Server

PAGE = (ROOT / "docs" / "serving.md").read_text()
README = (ROOT / "README.md").read_text()


def table(head: str) -> dict[str, str]:
    """Return the rows of a table: what the second column says of each name in the first."""
    rows = PAGE.split(head)[1].split("\n\n")[0]
    lines = [line.strip("|").split(" | ") for line in rows.splitlines() if line.startswith("| ")]
    return {
        name: cells[1].strip(" |") for cells in lines for name in re.findall(r"`(.*?)`", cells[0])
    }


def test_the_example_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = example.replace("http://127.0.0.1:8000", server.url)
    names: dict[str, object] = {}
    exec(compile(code, "docs/serving.md", "exec"), names)
    client = names["client"]
    client.close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out.strip()


def test_every_option_is_there_and_no_other() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    serve.add_options(parser)
    known = {action.option_strings[0] for action in parser._actions}
    assert table("| option | default | |").keys() == known


def test_the_defaults_are_those_of_the_code() -> None:
    said = table("| option | default | |")
    config = ServerConfig(api_key="x")
    for name in ("host", "port", "max_queue", "max_body_bytes"):
        assert said[f"--{name.replace('_', '-')}"] == f"`{getattr(config, name)}`"
    assert said["--drain-seconds"] == f"`{config.drain_seconds:g}`"
    assert API_KEY in said["--api-key"]
    assert f"more than {_CHUNKS_A_SECOND} chunks a second" in PAGE
    assert f"some {_MOST_TO_A_CHUNK} of them" in PAGE


def test_every_metric_is_there_and_no_other(server: Server) -> None:
    text = server.ask("GET", "/metrics").data.decode()
    found = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
        if not family.name.startswith("process_")
    }
    assert table("| name | |").keys() == found


def test_every_path_is_there(server: Server) -> None:
    for path in table("| path | |"):
        assert server.ask("GET", path).status in (200, 405), path
    for path in server.ask("GET", "/openapi.json").json["paths"]:
        assert f"`{path}`" in PAGE


def test_the_quick_start_installs_the_extra() -> None:
    for page in (PAGE, README):
        assert "'.[serve]'" in page
        assert "roseinfer serve --model tiny" in page


@pytest.mark.parametrize("file", ["docs/Containerfile", ".ci/constraints.txt"])
def test_the_files_it_names_are_there(file: str) -> None:
    assert (ROOT / file).is_file()


def test_the_container_begins_with_options_that_exist() -> None:
    (begin,) = re.findall(r"ENTRYPOINT \[(.*)\]", (ROOT / "docs" / "Containerfile").read_text())
    words = re.findall(r'"(.*?)"', begin)
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    assert words[:2] == ["roseinfer", "serve"]
    assert parser.parse_args(words[2:]).host == "0.0.0.0"
