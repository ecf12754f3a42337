"""Options about a server: refused ones, and a run of the suite against roseinfer's server."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.endpoint.server import Server, ServerError
from pytest_roseinfer.environment import variables
from pytest_roseinfer.plugin.options import endpoint_of, require_server
from pytest_roseinfer.report.verdict import describe_strength
from pytest_roseinfer.settings import POLITE_RATE, PROFILES, RATE, Endpoint, Settings
from roseinfer.engine.prefix_cache import PrefixCache
from tests.server.served import MODEL, running

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000",
        "http://localhost:1/v1",
        "http://[::1]:9",
        "http://0.0.0.0:8000",
        "http://[::]:8000",
    ],
)
def test_local_server_is_allowed(url: str) -> None:
    assert endpoint_of(url, None, None, allow_remote=False) == Endpoint(url)


def test_options_of_a_server_are_read() -> None:
    endpoint = endpoint_of("https://there:443/v1/", "m", 3.0, allow_remote=True)
    assert endpoint == Endpoint("https://there:443/v1/", "m", rate=3.0, allow_remote=True)
    assert endpoint_of(None, None, None, allow_remote=False) is None


@pytest.mark.parametrize(
    ("url", "rate"), [("http://127.0.0.1:8000", RATE), ("https://there", POLITE_RATE)]
)
def test_local_server_has_a_higher_rate(url: str, rate: float) -> None:
    endpoint = endpoint_of(url, None, None, allow_remote=True)
    assert endpoint is not None
    assert endpoint.rate == rate
    options = endpoint.options
    assert float(options[options.index("--roseinfer-rate") + 1]) == rate


@pytest.mark.parametrize(
    ("url", "model", "rate", "message"),
    [
        ("http://10.0.0.1:80", None, None, "another machine, which would get"),
        ("http://example.org", None, None, "--roseinfer-allow-remote if it is yours"),
        (
            "http://me:key@127.0.0.1:80",
            None,
            None,
            "pass a key in ROSEINFER_API_KEY",
        ),
        (
            "http://127.0.0.1:80?key=it",
            None,
            None,
            "pass a key in ROSEINFER_API_KEY",
        ),
        ("127.0.0.1:8000", None, None, "not a server's base URL; use one such as"),
        ("http://127.0.0.1:8000/v1/completions", None, None, "not a server's base URL"),
        ("http://127.0.0.1:99999", None, None, "use one such as .* at most 65535"),
        ("http://127.0.0.1:abc", None, None, "not a URL; use one such as"),
        ("http://[::1", None, None, "not a URL; use one such as"),
        ("http://there..org", None, None, "not a URL; use one such as"),
        ("http://127.0.0.1:8000", None, 0.0, "--roseinfer-rate 0: must be above 0"),
        (None, "m", None, "--roseinfer-model: no server to apply it to"),
        (None, None, 2.0, "--roseinfer-rate: no server to apply it to"),
    ],
)
def test_invalid_server_options_are_refused(
    url: str | None, model: str | None, rate: float | None, message: str
) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        endpoint_of(url, model, rate, allow_remote=False)


def test_api_key_is_not_among_the_shown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSEINFER_API_KEY", "secret")
    monkeypatch.setenv("ROSEINFER_SHOWN", "1")
    assert variables().get("ROSEINFER_SHOWN") == "1"
    assert "secret" not in variables().values()


@pytest.mark.parametrize("key", ["secret\n", "s\u00e9cret"])
def test_invalid_api_key_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSEINFER_API_KEY", key)
    with pytest.raises(pytest.UsageError, match="ROSEINFER_API_KEY: holds a character") as error:
        endpoint_of("http://127.0.0.1:8000", None, None, allow_remote=False)
    assert "cret" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "needs a key; put it into ROSEINFER_API_KEY"),
        ("wrong", "refuses the key in ROSEINFER_API_KEY"),
    ],
)
@pytest.mark.parametrize("model", ["", MODEL])
def test_missing_api_key_and_wrong_api_key_have_different_messages(
    key: str, message: str, model: str
) -> None:
    with (
        running(config={"api_key": "right"}) as server,
        pytest.raises(pytest.UsageError, match=rf"\d: the server {message} ") as error,
    ):
        require_server(Endpoint(server.url, model, key))
    assert "wrong" not in str(error.value)


@contextmanager
def serve_response(status: int, text: str) -> Iterator[str]:
    """Serve one response to every request, with ``KEY`` replaced by the key that was sent."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            key = self.headers.get("Authorization", "").removeprefix("Bearer ")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.replace("KEY", key).encode())

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_api_key_in_a_response_is_not_shown() -> None:
    with (
        serve_response(401, "no such key: KEY") as url,
        pytest.raises(pytest.UsageError, match=r"no such key: \(the key\)") as error,
    ):
        require_server(Endpoint(url, key="secret"))
    assert "secret" not in str(error.value)


def test_other_kind_of_server_is_refused_in_one_sentence() -> None:
    with (
        serve_response(200, "<html>") as url,
        pytest.raises(
            pytest.UsageError,
            match=r"no list of models in the response; name a model with --roseinfer-model$",
        ),
    ):
        require_server(Endpoint(url))


def test_invalid_url_is_reported_in_one_line(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--roseinfer-endpoint", "http://127.0.0.1:99999")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = filter(None, result.errlines)
    assert line.startswith("ERROR: --roseinfer-endpoint: not a URL; use one such as http://")


def test_unreachable_server_is_a_usage_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"--roseinfer-endpoint .*ConnectionRefusedError"):
        require_server(Endpoint("http://127.0.0.1:9"))


def test_unknown_model_is_a_usage_error() -> None:
    message = rf"the server has no model another: it has {MODEL} \(POST .*\)$"
    with running() as server, pytest.raises(pytest.UsageError, match=message):
        require_server(Endpoint(server.url, "another"))


def test_server_without_a_model_list_names_the_refused_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_models(_: Server) -> list[str]:
        raise ServerError("404")

    monkeypatch.setattr(Server, "_models", no_models)
    with (
        running() as server,
        pytest.raises(pytest.UsageError, match="refuses all streamed completions"),
    ):
        require_server(Endpoint(server.url, "another"))


@pytest.mark.slow
def test_reports_name_the_server_and_no_strength(
    pytester: pytest.Pytester,
) -> None:
    with running() as server:
        result = pytester.runpytest_subprocess(
            *(
                "--pyargs",
                "pytest_roseinfer.suite",
                "--roseinfer-examples=3",
                "-p",
                "no:cacheprovider",
            ),
            *("--roseinfer-endpoint", server.url),
            *("--roseinfer-report=out.json", "--roseinfer-report=out.html"),
        )
    result.assert_outcomes(passed=1, skipped=2)
    server_name = f"{server.url}, model {MODEL}"
    result.stdout.fnmatch_lines(
        [
            f"roseinfer: server {server_name}, profile *",
            "*ServedEngine*",
            f"* mixes of * on {server_name} in *",
        ]
    )
    report = json.loads((pytester.path / "out.json").read_text())
    assert report["server"] == {"url": server.url, "model": MODEL}
    assert report["device"] == server_name
    assert report["strength"] == "not measured for a server"
    page = (pytester.path / "out.html").read_text()
    assert server_name in page
    assert "planted bugs" not in page
    assert "Triton" not in result.stdout.str().split("environment")[0]


@pytest.mark.slow
def test_server_whose_prefix_cache_finds_nothing_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "_longest_complete_prefix", lambda *_: [])
    with running() as server:
        result = pytester.runpytest_subprocess(
            *("--pyargs", "pytest_roseinfer.suite", "--roseinfer-examples=3"),
            *("-p", "no:cacheprovider", "--roseinfer-endpoint", server.url),
        )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*prompt_served_from_cache*"])


@pytest.mark.parametrize("profile", ["dev", "ci"])
def test_strength_is_not_reported_for_a_server(profile: str) -> None:
    profile_settings = PROFILES[profile]
    run_settings = Settings(profile, profile_settings.examples, profile_settings.steps)
    assert "planted bugs" in describe_strength(run_settings, cut_short=False)
    server = replace(run_settings, endpoint=Endpoint("http://[::1]:9"))
    assert describe_strength(server, cut_short=False) == "not measured for a server"
