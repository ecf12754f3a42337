"""A finding is saved as a picture too, which needs nothing around it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from pytest_roseinfer.findings.svg import draw_failure
from tests.findings.recorded_findings import FORKED, of_never_copies

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"


def lines(picture: str) -> list[str]:
    tree = ElementTree.fromstring(picture)
    return ["".join(each.itertext()) for each in tree.iter(f"{SVG}text")]


def test_it_lies_beside_the_trace(tmp_path: Path) -> None:
    found = of_never_copies(str(tmp_path / ".roseinfer"))
    names = {key: (tmp_path / found[key]) for key in ("trace", "script", "drawing")}
    assert {file.stem for file in names.values()} == {names["trace"].stem}
    assert names["drawing"].suffix == ".svg"
    assert names["drawing"].read_text(encoding="utf-8") == draw_failure(found)


def test_it_says_what_is_wrong_and_draws_every_step() -> None:
    found = of_never_copies()
    picture = draw_failure(found)
    said = " ".join(lines(picture))
    assert "".join(found["what"].split()) in "".join(said.split())
    assert [step.describe() for step in FORKED if step.describe() not in said] == []
    assert "x2 shared" in said
    marked = ElementTree.fromstring(picture).iterfind(f".//{SVG}text[@class='strong bad']")
    assert "3.1" in [each.text for each in marked]


def test_of_a_long_history_the_last_steps_are_drawn() -> None:
    found = of_never_copies()
    found["frames"] = [*found["frames"][:3], *found["frames"][2:3] * 20, *found["frames"][3:]]
    assert (
        sum("append one token to sequences 1, 2" in line for line in lines(draw_failure(found)))
        < 12
    )


def test_what_has_no_frames_has_no_picture() -> None:
    assert draw_failure({**of_never_copies(), "frames": []}) == ""
