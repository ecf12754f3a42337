"""Frames are drawn as SVG: all that a cache may show of its blocks has a look of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from pytest_roseinfer.findings.svg import draw, words

if TYPE_CHECKING:
    from pytest_roseinfer.findings.frame import BlockView, Frame, SequenceView


def row(name: int, tokens: int, blocks: list[int | None] | None = None) -> SequenceView:
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


def block(
    number: int, *states: str, holders: tuple[int, ...] = (), marked: bool = False
) -> BlockView:
    return {
        "number": number,
        "states": list(states),
        "refcount": len(holders),
        "holders": list(holders),
        "marked": marked,
    }


def frame(sequences: list[SequenceView], *blocks: BlockView) -> Frame:
    return {
        "step": 1,
        "words": "append",
        "refused": "",
        "sequences": sequences,
        "blocks": list(blocks),
    }


def marks(shown: Frame, block_size: int = 2, before: Frame | None = None) -> str:
    *_, drawn = draw([before, shown] if before else [shown], block_size)
    image = drawn.as_image(words(shown))
    ElementTree.fromstring(image)
    return image


def boxes(image: str, kind: str) -> int:
    return sum(
        kind in (each.get("class") or "").split()
        for each in ElementTree.fromstring(image).iter("rect")
    )


def test_a_shared_block_is_drawn_for_each_holder() -> None:
    both = frame([row(0, 2, [4]), row(1, 2, [4])], block(4, "shared", holders=(0, 1)))
    image = marks(both)
    assert boxes(image, "shared") == 2
    assert "x2" in image
    assert "held by sequences 0, 1" in image


def test_blocks_that_nobody_holds_are_told_apart() -> None:
    image = marks(
        frame(
            [],
            block(1, "free"),
            block(2, "free", "cached"),
            block(3, "free", "poisoned"),
            block(5, "counted", marked=True),
        )
    )
    for said in ("free", "free, cached", "free, poisoned", "not free, held by no sequence"):
        assert f">{said}<" in image
    assert boxes(image, "cached") == 1
    assert image.count('class="hatch"') == 1
    assert boxes(image, "wrong") == 1


def test_a_block_that_is_held_and_free_says_so() -> None:
    wide = frame([row(0, 4, [4])], block(4, "held", "free", holders=(0,)))
    assert "also free" in marks(wide, block_size=4)


def test_a_wrong_token_shows_what_is_there() -> None:
    wrong = row(0, 2, [4])
    wrong["wrong"] = [{"position": 1, "found": "1.0", "words": "expected a, found b"}]
    image = marks(frame([wrong], block(4, "held", holders=(0,))))
    assert boxes(image, "wrong") == 1
    assert ">1.0</text>" in image
    assert ">0.1</text>" not in image
    assert "position 1: expected a, found b" in image
    assert "position 1 is wrong" in image


def test_a_sequence_that_is_wrong_as_a_whole_is_marked() -> None:
    assert "is wrong" in marks(frame([{**row(0, 1), "marked": True}]))


def test_of_a_long_block_the_ends_are_drawn_and_what_is_wrong() -> None:
    long = row(0, 20, [4, 5])
    long["wrong"] = [{"position": 9, "found": "poison", "words": "it is poison"}]
    image = marks(frame([long], block(4, "held"), block(5, "held")), block_size=16)
    shown = [at for at in range(20) if f">0.{at}</text>" in image]
    assert shown == [0, 1, 2, 3, 14, 15, 16, 17, 18, 19]
    assert ">poison</text>" in image
    assert ">+12</text>" in image


def test_what_left_a_window_and_what_is_reserved_are_drawn_as_such() -> None:
    gone = {**row(0, 5, [None, 4, 5]), "given_back": 1, "unwritten": 1}
    image = marks(frame([gone], block(4, "held"), block(5, "held")))  # type: ignore[list-item]
    assert ">given back</text>" in image
    assert boxes(image, "unwritten") == 1


def test_what_a_step_put_there_is_told_from_what_was_there() -> None:
    before = frame([row(0, 1, [4])], block(4, "held", holders=(0,)))
    assert boxes(marks(before), "new") == 0
    assert boxes(marks(frame([row(0, 2, [4])], block(4, "held")), before=before), "new") == 1
    moved = frame([row(0, 1, [6])], block(6, "held"))
    assert boxes(marks(moved, before=before), "new") == 1


def test_a_cache_without_tables_has_pages() -> None:
    assert ">page 0</text>" in marks(frame([row(0, 4)]), block_size=4)
