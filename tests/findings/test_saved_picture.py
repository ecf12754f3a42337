"""The SVG picture of a finding, which needs no other file."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from pytest_roseinfer.findings.svg import draw_failure
from tests.findings.recorded_findings import FORKED, finding_of_never_copies

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"


def lines(picture: str) -> list[str]:
    tree = ElementTree.fromstring(picture)
    return ["".join(each.itertext()) for each in tree.iter(f"{SVG}text")]


def test_picture_is_saved_next_to_the_trace(tmp_path: Path) -> None:
    finding = finding_of_never_copies(str(tmp_path / ".roseinfer"))
    files = {key: (tmp_path / finding[key]) for key in ("trace", "script", "drawing")}
    assert {file.stem for file in files.values()} == {files["trace"].stem}
    assert files["drawing"].suffix == ".svg"
    assert files["drawing"].read_text(encoding="utf-8") == draw_failure(finding)


def test_picture_describes_the_error_and_every_step() -> None:
    finding = finding_of_never_copies()
    picture = draw_failure(finding)
    text = " ".join(lines(picture))
    assert "".join(finding["summary"].split()) in "".join(text.split())
    assert [step.describe() for step in FORKED if step.describe() not in text] == []
    assert "x2 shared" in text
    wrong_texts = ElementTree.fromstring(picture).iterfind(f".//{SVG}text[@class='strong bad']")
    assert "3.1" in [each.text for each in wrong_texts]


def test_picture_of_a_long_history_shows_its_last_steps() -> None:
    finding = finding_of_never_copies()
    finding["frames"] = [
        *finding["frames"][:3],
        *finding["frames"][2:3] * 20,
        *finding["frames"][3:],
    ]
    assert (
        sum("append one token to sequences 1, 2" in line for line in lines(draw_failure(finding)))
        < 12
    )


def test_finding_without_frames_has_no_picture() -> None:
    assert draw_failure({**finding_of_never_copies(), "frames": []}) == ""
