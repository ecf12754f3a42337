"""Frames as SVG: each state of blocks and sequences has its own look."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from pytest_roseinfer.findings.svg import draw, words

if TYPE_CHECKING:
    from pytest_roseinfer.findings.frame import BlockView, Frame, SequenceView


def sequence_view(name: int, tokens: int, blocks: list[int | None] | None = None) -> SequenceView:
    return {
        "name": name,
        "state": "",
        "tokens": [f"{name}.{at}" for at in range(tokens)],
        "unwritten": 0,
        "pages": [],
        "blocks": blocks,
        "unreadable": "",
        "given_back": 0,
        "wrong": [],
        "marked": False,
    }


def block_view(
    number: int, *states: str, holders: tuple[int, ...] = (), marked: bool = False
) -> BlockView:
    return {
        "number": number,
        "states": list(states),
        "refcount": len(holders),
        "holders": list(holders),
        "marked": marked,
    }


def make_frame(sequences: list[SequenceView], *blocks: BlockView) -> Frame:
    return {
        "step": 1,
        "description": "append",
        "refused": "",
        "sequences": sequences,
        "blocks": list(blocks),
    }


def svg_of(frame: Frame, block_size: int = 2, before: Frame | None = None) -> str:
    *_, drawing = draw([before, frame] if before else [frame], block_size)
    image = drawing.as_image(words(frame))
    ElementTree.fromstring(image)
    return image


def count_boxes(image: str, kind: str) -> int:
    return sum(
        kind in (each.get("class") or "").split()
        for each in ElementTree.fromstring(image).iter("rect")
    )


def test_shared_block_is_drawn_for_each_holder() -> None:
    frame_of_two = make_frame(
        [sequence_view(0, 2, [4]), sequence_view(1, 2, [4])],
        block_view(4, "shared", holders=(0, 1)),
    )
    image = svg_of(frame_of_two)
    assert count_boxes(image, "shared") == 2
    assert "x2" in image
    assert "held by sequences 0, 1" in image


def test_blocks_without_holders_are_distinguished() -> None:
    image = svg_of(
        make_frame(
            [],
            block_view(1, "free"),
            block_view(2, "free", "cached"),
            block_view(3, "free", "poisoned"),
            block_view(5, "counted", marked=True),
        )
    )
    for label in ("free", "free, cached", "free, poisoned", "not free, held by no sequence"):
        assert f">{label}<" in image
    assert count_boxes(image, "cached") == 1
    assert image.count('class="hatch"') == 1
    assert count_boxes(image, "wrong") == 1


def test_block_that_is_held_and_free_is_labelled() -> None:
    long_block = make_frame([sequence_view(0, 4, [4])], block_view(4, "held", "free", holders=(0,)))
    assert "also free" in svg_of(long_block, block_size=4)


def test_wrong_token_shows_the_stored_token() -> None:
    wrong_sequence = sequence_view(0, 2, [4])
    wrong_sequence["wrong"] = [
        {"position": 1, "actual": "1.0", "description": "expected a, found b"}
    ]
    image = svg_of(make_frame([wrong_sequence], block_view(4, "held", holders=(0,))))
    assert count_boxes(image, "wrong") == 1
    assert ">1.0</text>" in image
    assert ">0.1</text>" not in image
    assert "position 1: expected a, found b" in image
    assert "position 1 is wrong" in image


def test_wrong_sequence_is_marked() -> None:
    assert "is wrong" in svg_of(make_frame([{**sequence_view(0, 1), "marked": True}]))


def test_long_block_shows_its_ends_and_wrong_tokens() -> None:
    long_sequence = sequence_view(0, 20, [4, 5])
    long_sequence["wrong"] = [{"position": 9, "actual": "poison", "description": "it is poison"}]
    image = svg_of(
        make_frame([long_sequence], block_view(4, "held"), block_view(5, "held")), block_size=16
    )
    positions = [at for at in range(20) if f">0.{at}</text>" in image]
    assert positions == [0, 1, 2, 3, 14, 15, 16, 17, 18, 19]
    assert ">poison</text>" in image
    assert ">+12</text>" in image


def test_freed_and_reserved_positions_are_drawn() -> None:
    windowed = {**sequence_view(0, 5, [None, 4, 5]), "given_back": 1, "unwritten": 1}
    image = svg_of(make_frame([windowed], block_view(4, "held"), block_view(5, "held")))  # type: ignore[list-item]
    assert ">given back</text>" in image
    assert count_boxes(image, "unwritten") == 1


def test_new_tokens_are_distinguished_from_earlier_ones() -> None:
    before = make_frame([sequence_view(0, 1, [4])], block_view(4, "held", holders=(0,)))
    assert count_boxes(svg_of(before), "new") == 0
    assert (
        count_boxes(
            svg_of(make_frame([sequence_view(0, 2, [4])], block_view(4, "held")), before=before),
            "new",
        )
        == 1
    )
    moved_frame = make_frame([sequence_view(0, 1, [6])], block_view(6, "held"))
    assert count_boxes(svg_of(moved_frame, before=before), "new") == 1


def test_cache_without_tables_is_drawn_as_pages() -> None:
    assert ">page 0</text>" in svg_of(make_frame([sequence_view(0, 4)]), block_size=4)
