"""The SVG picture of a finding, which needs no other file."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.findings.svg import draw_failure
from tests.findings.recorded_findings import (
    FORKED,
    NeverCopies,
    finding_of_never_copies,
    record_finding,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

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


class SwapsTwo(NeverCopies):
    """Writes the last row's token for row 40 of a batch of fifty."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if len(seqs) == 50:
            key = key.clone()
            key[:, 40] = key[:, 49]
        super().append(seqs, key, value)


def test_picture_of_fifty_sequences_is_small_and_has_those_of_the_error() -> None:
    everyone = tuple(range(50))
    steps = (*[Append(everyone[:49])] * 14, Append(everyone))
    finding = record_finding(SwapsTwo, steps, num_blocks=300, block_size=4)
    picture = draw_failure(finding)
    tree, text = ElementTree.fromstring(picture), lines(picture)
    assert max(float(tree.attrib[side]) for side in ("width", "height")) < 2000
    assert {"sequence 40", "sequence 49"} <= {*text}
    assert "42 other sequences, not drawn" in text
    assert sum(line.startswith("sequence ") for line in text[-40:]) <= 8
