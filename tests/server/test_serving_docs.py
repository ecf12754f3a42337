"""Example and lists of the pages about the server."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pytest_roseinfer.plugin.reference import read_section
from roseinfer.config import API_KEY, ServerConfig
from roseinfer.server import serve
from roseinfer.server.generation import _MAX_CHUNKS_PER_S, _MAX_TOKENS_PER_CHUNK
from tests.python_process import ROOT

if TYPE_CHECKING:
    from tests.server.served import Server

PAGE = (ROOT / "docs" / "how-to" / "serving.md").read_text()
REFERENCE_PAGE = ROOT / "docs" / "reference" / "server.md"
REFERENCE = REFERENCE_PAGE.read_text()
README = (ROOT / "README.md").read_text()


def entries(heading: str) -> list[str]:
    """List the names in the heads of the list under a heading, such as "- `a`, `b`: text"."""
    section = (
        (PAGE + REFERENCE)
        .partition(f"\n## {heading}\n")[2]
        .partition("\n## ")[0]
        .partition("\n### ")[0]
    )
    heads = re.findall(r"^- (`[^`]*`(?:,\s+`[^`]*`)*):", section, re.MULTILINE)
    return [name for head in heads for name in re.findall(r"`(.*?)`", head)]


def test_example_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = example.replace("http://127.0.0.1:8000", server.url)
    names: dict[str, object] = {}
    exec(compile(code, "docs/how-to/serving.md", "exec"), names)
    client = names["client"]
    client.close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out.strip()


def test_documented_options_match_the_command() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    serve.add_options(parser)
    options = {name for action in parser._actions for name in action.option_strings}
    first = {action.option_strings[0] for action in parser._actions}
    lists = [
        read_section(ROOT / page, name)
        for page, name in (
            ("docs/reference/server.md", "server settings"),
            ("docs/reference/engine.md", "engine settings"),
        )
    ]
    (model_options,) = re.findall(r"^`--model` is .*?\n\n", REFERENCE, re.MULTILINE | re.DOTALL)
    documented = set(re.findall(r"`(--[\w-]+)`", "\n".join([*lists, model_options])))
    assert first <= documented <= options


def test_documented_defaults_match_the_code() -> None:
    settings = " ".join(read_section(REFERENCE_PAGE, "server settings").split())
    config = ServerConfig(api_key="x")
    for name in ("host", "port", "max_queue", "max_body_bytes", "drain_seconds"):
        option = name.replace("_", "-")
        assert f"- `{name}` (`--{option}`, default `{getattr(config, name)!r}`" in settings
    assert f"`None`: {API_KEY} if that is set" in settings
    text = " ".join(PAGE.split())
    assert f"more than {_MAX_CHUNKS_PER_S} chunks a second" in text
    assert f"some {_MAX_TOKENS_PER_CHUNK} of them" in text


def test_documented_metrics_match_the_server(server: Server) -> None:
    text = server.request("GET", "/metrics").data.decode()
    metric_names = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
        if not family.name.startswith("process_")
    }
    assert sorted(entries("Metrics")) == sorted(metric_names)


def test_documented_paths_match_the_server(server: Server) -> None:
    paths = entries("Endpoints")
    assert "/v1/completions" in paths
    for path in paths:
        assert server.request("GET", path).status in (200, 405), path
    for path in server.request("GET", "/openapi.json").json["paths"]:
        assert f"`{path}`" in PAGE


def test_quick_start_installs_the_extra() -> None:
    for page in (PAGE, README):
        assert "'.[serve]'" in page
        assert "roseinfer serve --model tiny" in page


@pytest.mark.parametrize("file", ["docs/Containerfile", ".ci/constraints.txt"])
def test_documented_files_exist(file: str) -> None:
    assert (ROOT / file).is_file()


def test_container_entrypoint_has_valid_options() -> None:
    (entrypoint,) = re.findall(
        r"ENTRYPOINT \[(.*)\]", (ROOT / "docs" / "Containerfile").read_text()
    )
    words = re.findall(r'"(.*?)"', entrypoint)
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    assert words[:2] == ["roseinfer", "serve"]
    assert parser.parse_args(words[2:]).host == "0.0.0.0"
