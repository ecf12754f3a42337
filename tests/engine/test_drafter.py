"""Drafts are what followed when a text ended alike, and stop where they are refused."""

from __future__ import annotations

import pytest

from roseinfer.engine.drafter import MAX_DRAFT_TOKENS, Drafter


def drafter(*, check_interval: int = 1, drafting: bool = True) -> Drafter:
    return Drafter(check_interval=check_interval, drafting=drafting)


@pytest.mark.parametrize(
    ("text", "most", "drafts"),
    [
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], 3, [9, 8, 7]),
        ([1, 2, 3, 9, 1, 2, 3], 6, [9, 1, 2, 3, 9, 1]),  # round and round
        ([5, 5, 5], 4, [5, 5, 5, 5]),
        ([1, 2, 6, 4, 2, 7, 1, 2], 2, [6, 4]),  # two tokens alike go before one, seen later
        ([4, 6, 4, 7, 4], 1, [7]),  # of two places, the later
        ([1, 2, 3], 5, []),
        ([3], 5, []),
        ([1, 1], 0, []),
        ([0x110000 + 4, 9, 0x110000 + 4], 1, [9]),  # more tokens than there are characters
    ],
)
def test_what_followed_is_drafted(text: list[int], most: int, drafts: list[int]) -> None:
    assert drafter().draft(text, most) == drafts


def test_there_are_never_more_drafts_than_a_step_has_room_for() -> None:
    assert drafter().draft([1, 1, 1], 100) == [1] * MAX_DRAFT_TOKENS


def test_a_text_that_grows_is_searched_to_its_end() -> None:
    growing = drafter()
    text = [1, 2, 3, 4]
    assert growing.draft(text, 2) == []
    text += [8, 2, 3]
    assert growing.draft(text, 2) == [4, 8]


def test_drafting_begins_when_the_last_tokens_would_have_been_drafted() -> None:
    asleep = drafter(drafting=False)
    text = [1, 2, 3, 4, 5, 1]
    assert not asleep.should_draft(text)
    text.append(2)
    assert not asleep.should_draft(text)
    text.append(3)
    assert asleep.should_draft(text)


def test_a_request_in_a_slot_is_looked_at_now_and_then() -> None:
    asleep = drafter(check_interval=8, drafting=False)
    assert not asleep.should_draft([1, 2])
    woken = [length for length in range(3, 20) if asleep.should_draft([1] * length)]
    assert woken[0] == 2 + 8


def test_rests_grow_while_drafts_are_refused_and_shrink_when_all_are_accepted() -> None:
    refused = drafter()
    text = [1] * 10
    rests = []
    for _ in range(4):
        refused.record_acceptance(0, 8, len(text))
        before = len(text)
        while not refused.should_draft(text):
            text.append(1)
        rests.append(len(text) - before)
    assert rests == [4, 8, 16, 32]
    refused.record_acceptance(8, 8, len(text))
    for _ in range(3):  # what was accepted pays for some that are not
        assert refused.drafting
        refused.record_acceptance(0, 8, len(text))
    before = len(text)
    while not refused.should_draft(text):
        text.append(1)
    assert len(text) - before == 32


def test_no_rest_is_endless() -> None:
    refused = drafter()
    text = [1] * 10
    for _ in range(12):
        refused.record_acceptance(0, 8, len(text))
        before = len(text)
        text += [1] * 256
        assert refused.should_draft(text), before
