"""Names of models: resolved without torch, and within seconds without a network."""

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
from roseinfer.models import locate_model
from roseinfer.models.locate_model import locate
from tests.python_process import run_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNREACHABLE = "http://127.0.0.1:9"
"""Address with no listener."""


class Hub(BaseHTTPRequestHandler):
    """Hub with one model, some/model, and a repository without a config, some/data."""

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
    """Hub that accepts a request and does not answer."""

    def do_HEAD(self) -> None:
        time.sleep(3 * locate_model._HUB_TIMEOUT_S)


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
    """Empty hub cache, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


def use_hub(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
    template = template.replace(huggingface_hub.constants.ENDPOINT, endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)


def error_of(name: str) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        locate(name)
    message = str(caught.value)
    assert message.startswith(f"{name!r} cannot be loaded: ")
    assert "\n" not in message
    return message


def add_to_cache(cache: Path) -> Path:
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
def test_missing_directory_is_reported(name: str) -> None:
    assert error_of(name).endswith("there is no such directory")


def test_file_and_empty_name_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    message = f"it is a file: give the directory, {str(tmp_path)!r}"
    assert error_of(str(tmp_path / "model.safetensors")).endswith(message)
    assert "it is not a name: give a directory, a GGUF file, a hub id" in error_of("")


def test_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    assert locate("~/mine") == str(tmp_path / "mine")


def test_similar_directory_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "models" / "gpt2-tuned").mkdir(parents=True)
    assert error_of("./models/gpt2-tunde").endswith("did you mean models/gpt2-tuned?")


def test_directory_without_a_config_suggests_its_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-500").mkdir(parents=True)
    assert error_of("run").endswith("it has no config.json")
    (tmp_path / "run" / "checkpoint-500" / "config.json").touch()
    assert error_of("run").endswith("it has no config.json; did you mean run/checkpoint-500?")
    assert locate("run/checkpoint-500") == "run/checkpoint-500"


def test_adapter_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    assert "merge the adapter into its model" in error_of(str(tmp_path))


# -------------------------------------------------------------------------------- the hub


def test_model_of_the_hub_is_located(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(hub, monkeypatch)
    assert locate("some/model") == "some/model"


def test_model_missing_on_the_hub_is_reported(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(hub, monkeypatch)
    assert f"the hub ({hub}) has no model of that name" in error_of("no/such-model")
    assert f"on the hub ({hub}) it has no config.json" in error_of("some/data")
    assert "the hub has no such names" in error_of("what is this")


def test_unreachable_hub_is_reported_unless_cached(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(UNREACHABLE, monkeypatch)
    message = error_of("some/model")
    assert (
        f"it is not in the local cache, and the hub ({UNREACHABLE}) cannot be reached: " in message
    )
    assert locate("tiny") == "tiny"
    folder = add_to_cache(cache)
    assert locate("some/model") == str(folder)


@pytest.mark.parametrize("hangs", [True, False], ids=["before the request", "in the response"])
def test_silent_hub_times_out(monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    monkeypatch.setattr(locate_model, "_HUB_TIMEOUT_S", 0.2)
    servers = address(SilentHub)
    use_hub(next(servers), monkeypatch)
    if hangs:
        silence = threading.Event()
        monkeypatch.setattr(
            huggingface_hub, "get_hf_file_metadata", lambda *_, **__: silence.wait(3)
        )
    begin = time.monotonic()
    assert "cannot be reached: " in error_of("some/model")
    assert time.monotonic() - begin < 2
    next(servers, None)


def test_offline_mode_uses_the_cache_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in error_of("some/model")
    folder = add_to_cache(cache)
    assert locate("some/model") == str(folder)


# ------------------------------------------------------------------ before torch is imported


def test_generate_queries_the_hub_before_importing_torch(hub: str) -> None:
    message = run_python(
        """
        import sys
        from roseinfer.cli import main

        assert main(["generate", "--prompt", "x", "--model", "no/such-model"]) == 2
        print("torch" in sys.modules)
        """,
        HF_ENDPOINT=hub,
    )
    assert message == "False\n"


@pytest.mark.parametrize("name", ["cpu", "cpu:0", "cuda", "cuda:1"])
def test_valid_devices_are_accepted(name: str, tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    require_device(name, tmp_path)


def test_invalid_devices_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvme0").touch()
    monkeypatch.setattr("sys.platform", "linux")
    for name, reason in {
        "cud": "did you mean cuda",
        "gpu": "did you mean cuda",
        "cuda:x": "cuda or cuda:1",
        "cuda:": "cuda or cuda:1",
        "cuda:0": "there is no GPU here",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            require_device(name, tmp_path)
