"""The options about a server: what is refused, and a run of the suite against ours."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_roseinfer.endpoint.server import Server, ServerError
from pytest_roseinfer.environment import variables
from pytest_roseinfer.plugin.endpoint_options import endpoint_of, require_server
from pytest_roseinfer.report.strength import how_strong
from pytest_roseinfer.settings import POLITE_RATE, PROFILES, RATE, Endpoint, Settings
from tests.server.served import MODEL, running


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://localhost:1/v1", "http://[::1]:9"]
)
def test_this_machine_is_asked(url: str) -> None:
    assert endpoint_of(url, None, None, anywhere=False) == Endpoint(url)


def test_what_is_told_of_a_server() -> None:
    made = endpoint_of("https://there:443/v1/", "m", 3.0, anywhere=True)
    assert made == Endpoint("https://there:443/v1/", "m", rate=3.0, anywhere=True)
    assert endpoint_of(None, None, None, anywhere=False) is None


@pytest.mark.parametrize(
    ("url", "rate"), [("http://127.0.0.1:8000", RATE), ("https://there", POLITE_RATE)]
)
def test_a_server_of_this_machine_is_asked_more_often(url: str, rate: float) -> None:
    made = endpoint_of(url, None, None, anywhere=True)
    assert made is not None
    assert made.rate == rate
    words = made.options
    assert float(words[words.index("--roseinfer-rate") + 1]) == rate


@pytest.mark.parametrize(
    ("url", "model", "rate", "words"),
    [
        ("http://10.0.0.1:80", None, None, "is another machine"),
        ("http://example.org", None, None, "--roseinfer-endpoint-anywhere if it is yours"),
        (
            "http://me:key@127.0.0.1:80",
            None,
            None,
            "put no key into it, but into ROSEINFER_API_KEY",
        ),
        (
            "http://127.0.0.1:80?key=it",
            None,
            None,
            "put no key into it, but into ROSEINFER_API_KEY",
        ),
        ("127.0.0.1:8000", None, None, "give an address such as"),
        ("http://127.0.0.1:8000/v1/completions", None, None, "give an address such as"),
        ("http://127.0.0.1:8000", None, 0.0, "--roseinfer-rate 0: it must be above 0"),
        (None, "m", None, "--roseinfer-model is about a server"),
        (None, None, 2.0, "--roseinfer-rate is about a server"),
    ],
)
def test_what_makes_no_sense_is_refused(
    url: str | None, model: str | None, rate: float | None, words: str
) -> None:
    with pytest.raises(pytest.UsageError, match=words):
        endpoint_of(url, model, rate, anywhere=False)


def test_a_key_is_none_of_the_variables_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSEINFER_API_KEY", "secret")
    monkeypatch.setenv("ROSEINFER_SHOWN", "1")
    assert variables().get("ROSEINFER_SHOWN") == "1"
    assert "secret" not in variables().values()


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(pytest.UsageError, match=r"--roseinfer-endpoint .*ConnectionRefusedError"):
        require_server(Endpoint("http://127.0.0.1:9"))


def test_a_model_that_is_not_there() -> None:
    said = rf"the server has no model another: it has {MODEL} \(POST .*\)$"
    with running() as server, pytest.raises(pytest.UsageError, match=said):
        require_server(Endpoint(server.url, "another"))


def test_of_a_server_that_lists_no_models_it_is_told_what_it_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(_: Server) -> list[str]:
        raise ServerError("404")

    monkeypatch.setattr(Server, "_models", none)
    with running() as server, pytest.raises(pytest.UsageError, match="takes no streamed text"):
        require_server(Endpoint(server.url, "another"))


def test_the_reports_of_a_run_name_the_server_and_claim_no_strength(
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
    where = f"{server.url}, model {MODEL}"
    result.stdout.fnmatch_lines(
        [f"roseinfer: server {where}, profile *", "*ServedEngine*", f"* mixes of * on {where} in *"]
    )
    found = json.loads((pytester.path / "out.json").read_text())
    assert found["server"] == {"url": server.url, "model": MODEL}
    assert found["device"] == where
    assert found["strength"] == "not measured for a server"
    page = (pytester.path / "out.html").read_text()
    assert where in page
    assert "planted bugs" not in page
    assert "Triton" not in result.stdout.str().split("environment")[0]


@pytest.mark.parametrize("profile", ["dev", "ci"])
def test_no_strength_is_claimed_of_a_server(profile: str) -> None:
    usual = PROFILES[profile]
    asked = Settings(profile, usual.examples, usual.steps)
    assert "planted bugs" in how_strong(asked, cut_short=False)
    server = replace(asked, endpoint=Endpoint("http://[::1]:9"))
    assert how_strong(server, cut_short=False) == "not measured for a server"
