"""Opens a page in a headless Chromium, and returns the result of a script."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # root cannot start a sandboxed browser
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
)
_ANSWER = """<script>
addEventListener("load", () => {{
  const answer = parent.document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify((() => {{ {script} }})());
  parent.document.body.append(answer);
}});
</script>"""
_FRAME = '<!doctype html><iframe width="{width}" height="900" style="border:0" srcdoc="{page}">'
"""A page with a frame, since a window cannot be as narrow as a phone."""


def require_browser() -> str:
    """Return the browser's path; skip the test where there is none."""
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("needs a headless Chromium, as Debian's package chromium is")
    return browser


def run_in_page(
    page: str, script: str, folder: Path, *, width: int = 1100, dark: bool = False
) -> Any:
    """Open a page in a frame of this width, run a script in it, and return its result."""
    file = folder / "page.html"
    page_with_script = page.replace("</body>", f"{_ANSWER.format(script=script)}</body>")
    file.write_text(_FRAME.format(width=width, page=escape(page_with_script)))
    colours = ["--blink-settings=preferredColorScheme=0"] * dark
    return answer_in(file.as_uri(), folder, *colours)


def answer_in(url: str, folder: Path, *options: str) -> Any:
    """Open a page that writes its own answer, as JSON, and return it."""
    process = subprocess.run(
        [
            require_browser(),
            *_OPTIONS,
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1200,900",
            *options,
            "--dump-dom",
            url,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answer = re.search(r'<pre id="answer">(.*?)</pre>', process.stdout, re.S)
    assert answer, process.stdout[-2000:]
    return json.loads(unescape(answer[1]))
