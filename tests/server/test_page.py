"""The page at ``/`` in a headless Chromium: entering a prompt and reading its completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.server import app
from tests.report.browser import answer_in, require_browser
from tests.server.served import running

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.served import Server

HARNESS = """<script>
addEventListener("load", async () => {
  const later = (ms) => new Promise((go) => setTimeout(go, ms));
  const until = async (holds) => { while (!holds()) await later(20); };
  const seen = { errors: [] };
  addEventListener("error", (event) => seen.errors.push(event.message));
  const ask = async (prompt, tokens) => {
    at("prompt").value = prompt;
    at("tokens").value = tokens;
    at("go").click();
    await until(() => at("status").textContent);
    return [at("text").textContent, at("status").textContent, at("text").children.length];
  };
  SCRIPT
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify(seen);
  document.body.append(answer);
});
</script>"""
PROMPT = "a rose is a rose is a rose is a rose is a rose"
SCRIPT_OF_A_SESSION = f"""
  at("temperature").value = 0;
  at("key").value = "rose-key";
  seen.first = await ask("{PROMPT}", 40);
  seen.again = await ask("{PROMPT}", 40);
  await refresh();
  seen.cached = [at("cached-blocks").textContent, at("cached").getBoundingClientRect().width];
  seen.hits = at("hits").textContent;
  at("tokens").value = 900;
  at("go").click();
  await until(() => at("text").children.length > 2);
  at("stop").click();
  await until(() => at("status").textContent);
  seen.stopped = at("status").textContent;
  seen.refused = await ask("x".repeat(2000), 5);
  seen.keyed = !at("key-label").hidden;
  const loaded = performance.getEntriesByType("resource").map((each) => each.name);
  seen.others = loaded.filter((name) => !name.startsWith(location.origin));
  seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
"""


def run_on_page(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Any:
    """Run a script on the page, and return what it recorded."""
    instrumented = app._page_source().replace(
        "</body>", HARNESS.replace("SCRIPT", script) + "</body>"
    )
    monkeypatch.setattr(app, "_page_source", lambda: instrumented)
    return answer_in(server.url, folder, "--virtual-time-budget=60000")


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
def test_page_shows_a_streamed_completion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    require_browser()
    with running(config={"api_key": "rose-key"}) as server:
        if not chat:
            monkeypatch.setattr(server.service.prompts, "_chat_template", None)
        seen = run_on_page(server, tmp_path, monkeypatch, SCRIPT_OF_A_SESSION)
        headers = {"authorization": "Bearer rose-key"}
        prompt = f"user: {PROMPT}\nassistant:" if chat else PROMPT
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
        answer = server.request("POST", "/v1/completions", body, headers=headers).json
    text, status, parts = seen["first"]
    assert text == answer["choices"][0]["text"]
    assert seen["again"][0] == text
    assert f"0 of {len(prompt)} prompt tokens" in status
    assert f"{(len(prompt) - 1) // 16 * 16} of {len(prompt)} prompt tokens" in seen["again"][1]
    assert parts > 1
    assert int(seen["cached"][0]) > 0
    assert seen["cached"][1] > 0
    assert not seen["hits"].startswith("0 of")
    assert seen["stopped"] == "stopped"
    assert "the prompt has " in seen["refused"][1]
    assert seen["keyed"]
    assert (seen["errors"], seen["others"], seen["wide"]) == ([], [], 0)
    assert server.service.metrics.finish_reasons["abort"] >= 1


@pytest.mark.slow
def test_page_reports_a_missing_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_browser()
    with running(config={"api_key": "rose-key"}) as server:
        seen = run_on_page(server, tmp_path, monkeypatch, 'seen.first = await ask("x", 4);')
    assert "API key missing" in seen["first"][1]


def test_page_has_a_strict_content_security_policy(server: Server) -> None:
    answer = server.request("GET", "/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert b"http://" not in answer.data
    assert b"https://" not in answer.data


def test_model_name_cannot_end_the_script_of_the_page() -> None:
    with running(config={"served_model_name": ("</script><b>",)}) as server:
        assert b"</script><b>" not in server.request("GET", "/").data
