"""What a model's name stands for is found without torch, and within seconds without a network."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import huggingface_hub.constants
import pytest

from roseinfer import UnsupportedModel
from roseinfer.config import require_device
from roseinfer.errors import ConfigError
from roseinfer.models import source
from roseinfer.models.source import locate
from tests.python_process import run_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REFUSING = "http://127.0.0.1:9"
"""Nobody listens there."""


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, some/model, and one without a config, some/data."""

    def do_HEAD(self) -> None:
        if self.path.startswith("/some/model/"):
            self.send_response(200)
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "0" * 40)
        else:
            missing = "EntryNotFound" if self.path.startswith("/some/data/") else "RepoNotFound"
            self.send_response(404)
            self.send_header("X-Error-Code", missing)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class SilentHub(Hub):
    """It takes the question and does not answer."""

    def do_HEAD(self) -> None:
        time.sleep(3 * source._HUB_TIMEOUT_S)


def address(handler: type[Hub]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    yield from address(Hub)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have an empty cache, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


def at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
    template = template.replace(huggingface_hub.constants.ENDPOINT, endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)


def refused(name: str) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        locate(name)
    said = str(caught.value)
    assert said.startswith(f"{name!r} cannot be loaded: ")
    assert "\n" not in said
    return said


def downloaded(cache: Path) -> Path:
    """Put some/model into the cache."""
    repository, commit = cache / "models--some--model", "0" * 40
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (folder / "config.json").write_text("{}")
    return folder


# ---------------------------------------------------------------------------- directories


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/place", "a/b/c"])
def test_a_directory_that_is_not_there(name: str) -> None:
    assert refused(name).endswith("there is no such directory")


def test_a_file_and_no_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    said = f"it is a file: give the directory, {str(tmp_path)!r}"
    assert refused(str(tmp_path / "model.safetensors")).endswith(said)
    assert "it is not a name: give a directory" in refused("")


def test_a_directory_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    assert locate("~/mine") == str(tmp_path / "mine")


def test_the_directory_that_was_probably_meant(tmp_path: Path) -> None:
    (tmp_path / "models" / "gpt2-tuned").mkdir(parents=True)
    assert refused("./models/gpt2-tunde").endswith("did you mean models/gpt2-tuned?")


def test_a_directory_without_a_config_names_those_in_it_that_have_one(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-500").mkdir(parents=True)
    assert refused("run").endswith("it has no config.json")
    (tmp_path / "run" / "checkpoint-500" / "config.json").touch()
    assert refused("run").endswith("it has no config.json; did you mean run/checkpoint-500?")
    assert locate("run/checkpoint-500") == "run/checkpoint-500"


def test_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    assert "merge the adapter into its model" in refused(str(tmp_path))


# -------------------------------------------------------------------------------- the hub


def test_a_model_of_the_hub(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at(hub, monkeypatch)
    assert locate("some/model") == "some/model"


def test_a_hub_that_has_no_such_model(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at(hub, monkeypatch)
    assert f"the hub ({hub}) has no model of that name" in refused("no/such-model")
    assert f"on the hub ({hub}) it has no config.json" in refused("some/data")
    assert "the hub has no such names" in refused("what is this")


def test_a_hub_that_cannot_be_reached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(REFUSING, monkeypatch)
    said = refused("some/model")
    assert f"it is not in the local cache, and the hub ({REFUSING}) cannot be reached: " in said
    assert locate("tiny") == "tiny"
    folder = downloaded(cache)
    assert locate("some/model") == str(folder)


@pytest.mark.parametrize("hangs", [True, False], ids=["in the look-up", "in the answer"])
def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    monkeypatch.setattr(source, "_HUB_TIMEOUT_S", 0.2)
    servers = address(SilentHub)
    at(next(servers), monkeypatch)
    if hangs:
        silence = threading.Event()
        monkeypatch.setattr(
            huggingface_hub, "get_hf_file_metadata", lambda *_, **__: silence.wait(3)
        )
    begin = time.monotonic()
    assert "cannot be reached: " in refused("some/model")
    assert time.monotonic() - begin < 2
    next(servers, None)


def test_offline_the_cache_is_all_there_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused("some/model")
    folder = downloaded(cache)
    assert locate("some/model") == str(folder)


# ---------------------------------------------------------------------- before torch is there


def test_generate_asks_the_hub_before_torch_is_imported(hub: str) -> None:
    said = run_python(
        """
        import sys
        from roseinfer.cli import main

        assert main(["generate", "--prompt", "x", "--model", "no/such-model"]) == 2
        print("torch" in sys.modules)
        """,
        HF_ENDPOINT=hub,
    )
    assert said == "False\n"


@pytest.mark.parametrize("name", ["cpu", "cpu:0", "cuda", "cuda:1"])
def test_devices(name: str, tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    require_device(name, tmp_path)


def test_devices_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvme0").touch()
    monkeypatch.setattr("sys.platform", "linux")
    for name, why in {
        "cud": "did you mean cuda",
        "gpu": "did you mean cuda",
        "cuda:x": "cuda or cuda:1",
        "cuda:": "cuda or cuda:1",
        "cuda:0": "there is no GPU here",
    }.items():
        with pytest.raises(ConfigError, match=why):
            require_device(name, tmp_path)
