"""The page in a headless Chromium: what it shows, and that one can step through what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer.report.html import page
from tests.findings.recorded_findings import FORKED, of_never_copies
from tests.report.browser import asked, require_browser
from tests.report.test_reports import example

if TYPE_CHECKING:
    from pathlib import Path

LOOK = """
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
    found = {**of_never_copies(), "tests": ["test_kv.py::test_a", "test_kv.py::test_b"]}
    files = {"trace": "kv/it.json", "script": "kv/it.py", "drawing": "kv/it.svg"}
    saved = {path: f"<{name}>" for name, path in files.items()}
    return page({**example(), "findings": [{**found, **files}]}, saved, {})  # type: ignore[typeddict-item]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a phone shows, in dark colours."""
    require_browser()
    folder = tmp_path_factory.mktemp("browser")
    found: dict[str, Any] = asked(failed_page(), LOOK, folder, width=360, dark=True)
    return found


def test_it_says_what_was_found_and_who_met_it(seen: dict[str, Any]) -> None:
    for said in (
        "sequence 0, token 1",
        "sequence 3, token 1",
        "test_kv.py::test_a",
        "test_kv.py::test_b",
        "refused: no room (3 blocks needed, 2 free)",
    ):
        assert said in seen["text"]


def test_one_steps_through_the_history_by_buttons_keys_and_picks(seen: dict[str, Any]) -> None:
    """It begins with the last step, where something is wrong."""
    words = [step.describe() for step in FORKED]
    for name, at in (("first", 5), ("clicked", 4), ("pressed", 3), ("picked", 1)):
        said, frames = seen[name]
        assert said == f"step {at} of 5"
        (frame,) = frames
        assert words[at - 1] in frame
        assert "before" in frame
        assert "after" in frame
    assert seen["back_is_off"]


def test_no_request_leaves_the_page(seen: dict[str, Any]) -> None:
    assert seen["requests"] == []


def test_a_phone_scrolls_inside_figures_alone(seen: dict[str, Any]) -> None:
    assert seen["too_wide"] == 0


def test_files_are_downloaded_from_the_page_itself(seen: dict[str, Any]) -> None:
    assert seen["downloads"] == [
        ["it.json", "<trace>"],
        ["it.py", "<script>"],
        ["it.svg", "<drawing>"],
    ]


def test_all_that_is_drawn_or_pressed_has_a_name(seen: dict[str, Any]) -> None:
    assert seen["nameless"] == 0


def test_in_light_and_without_a_script_all_steps_are_shown(
    tmp_path: Path, seen: dict[str, Any]
) -> None:
    whole = failed_page()
    begin, end = whole.index("<script>"), whole.index("</script>")
    script = """
      const frames = [...document.querySelectorAll(".frame")];
      return {
        shown: frames.filter((frame) => frame.getClientRects().length).length,
        buttons: [...document.querySelectorAll("button")].filter(
          (button) => button.getClientRects().length).length,
        paper: getComputedStyle(document.body).backgroundColor,
      };
    """
    found = asked(whole[:begin] + whole[end:], script, tmp_path, width=360)
    assert found == {
        "shown": len(FORKED),
        "buttons": 0,
        "paper": "rgb(255, 255, 255)",
    }
    assert seen["paper"] == "rgb(20, 24, 31)"
