"""The HTML report in a headless Chromium: its contents, and stepping through a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer.report.html import page
from tests.findings.recorded_findings import FORKED, finding_of_never_copies
from tests.report.browser import require_browser, run_in_page
from tests.report.test_reports import example

if TYPE_CHECKING:
    from pathlib import Path

READ_PAGE = """
  const shown = (part) => part.getClientRects().length > 0;
  const strip = document.querySelector(".strip");
  const step = () => [
    strip.querySelector(".at").textContent,
    [...strip.querySelectorAll(".frame")].filter(shown).map((frame) => frame.innerText),
  ];
  const seen = { first: step() };
  strip.querySelector(".steps button").click();
  seen.clicked = step();
  strip.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true }));
  seen.pressed = step();
  strip.querySelector(".history button").click();
  seen.picked = step();
  seen.back_is_off = strip.querySelector(".steps button").disabled;
  seen.text = document.body.innerText;
  seen.requests = performance.getEntriesByType("resource").map((each) => each.name);
  seen.too_wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  seen.paper = getComputedStyle(document.body).backgroundColor;
  seen.nameless = [...document.querySelectorAll("svg, button, a, [role=group]")].filter(
    (part) => !(part.getAttribute("aria-label") || part.textContent.trim())).length;
  seen.downloads = [...document.querySelectorAll("a[download]")].map(
    (link) => [link.download, atob(link.href.split("base64,")[1])]);
  return seen;
"""


def failed_page() -> str:
    finding = {**finding_of_never_copies(), "tests": ["test_kv.py::test_a", "test_kv.py::test_b"]}
    files = {"trace": "kv/it.json", "script": "kv/it.py", "drawing": "kv/it.svg"}
    file_contents = {path: f"<{name}>" for name, path in files.items()}
    return page({**example(), "findings": [{**finding, **files}]}, file_contents, {})  # type: ignore[typeddict-item]


@pytest.fixture(scope="module")
def page_state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the page's state on a phone, with dark colours."""
    require_browser()
    folder = tmp_path_factory.mktemp("browser")
    state: dict[str, Any] = run_in_page(failed_page(), READ_PAGE, folder, width=360, dark=True)
    return state


def test_page_shows_the_finding_and_its_tests(page_state: dict[str, Any]) -> None:
    for text in (
        "sequence 0, token 1",
        "sequence 3, token 1",
        "test_kv.py::test_a",
        "test_kv.py::test_b",
        "refused: no room (3 blocks needed, 2 free)",
    ):
        assert text in page_state["text"]


def test_history_is_stepped_by_buttons_keys_and_list(page_state: dict[str, Any]) -> None:
    """The page begins with the last step, which has the error."""
    words = [step.describe() for step in FORKED]
    for name, step_number in (("first", 5), ("clicked", 4), ("pressed", 3), ("picked", 1)):
        position, frames = page_state[name]
        assert position == f"step {step_number} of 5"
        (frame,) = frames
        assert words[step_number - 1] in frame
        assert "before" in frame
        assert "after" in frame
    assert page_state["back_is_off"]


def test_page_sends_no_request(page_state: dict[str, Any]) -> None:
    assert page_state["requests"] == []


def test_page_fits_the_width_of_a_phone(page_state: dict[str, Any]) -> None:
    assert page_state["too_wide"] == 0


def test_files_are_downloaded_from_the_page(page_state: dict[str, Any]) -> None:
    assert page_state["downloads"] == [
        ["it.json", "<trace>"],
        ["it.py", "<script>"],
        ["it.svg", "<drawing>"],
    ]


def test_graphics_and_controls_have_accessible_names(page_state: dict[str, Any]) -> None:
    assert page_state["nameless"] == 0


def test_page_without_script_shows_all_steps(tmp_path: Path, page_state: dict[str, Any]) -> None:
    full_page = failed_page()
    begin, end = full_page.index("<script>"), full_page.index("</script>")
    script = """
      const frames = [...document.querySelectorAll(".frame")];
      return {
        shown: frames.filter((frame) => frame.getClientRects().length).length,
        buttons: [...document.querySelectorAll("button")].filter(
          (button) => button.getClientRects().length).length,
        paper: getComputedStyle(document.body).backgroundColor,
      };
    """
    state = run_in_page(full_page[:begin] + full_page[end:], script, tmp_path, width=360)
    assert state == {
        "shown": len(FORKED),
        "buttons": 0,
        "paper": "rgb(255, 255, 255)",
    }
    assert page_state["paper"] == "rgb(20, 24, 31)"
