"""N-gram drafts: continuations of earlier equal suffixes, paused while they are rejected."""

from __future__ import annotations

import pytest

from roseinfer.engine.drafter import MAX_DRAFT_TOKENS, Drafter


def drafter(*, check_interval: int = 1, drafting: bool = True) -> Drafter:
    return Drafter(check_interval=check_interval, drafting=drafting)


@pytest.mark.parametrize(
    ("text", "max_drafts", "drafts"),
    [
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], 3, [9, 8, 7]),
        ([1, 2, 3, 9, 1, 2, 3], 6, [9, 1, 2, 3, 9, 1]),  # periodic
        ([5, 5, 5], 4, [5, 5, 5, 5]),
        (
            [1, 2, 6, 4, 2, 7, 1, 2],
            2,
            [6, 4],
        ),  # two equal tokens take precedence over a later single one
        ([4, 6, 4, 7, 4], 1, [7]),  # the later of two matches
        ([1, 2, 3], 5, []),
        ([3], 5, []),
        ([1, 1], 0, []),
        ([0x110000 + 4, 9, 0x110000 + 4], 1, [9]),  # more token ids than there are characters
    ],
)
def test_draft_continues_an_earlier_match(
    text: list[int], max_drafts: int, drafts: list[int]
) -> None:
    assert drafter().draft(text, max_drafts) == drafts


def test_draft_length_is_limited() -> None:
    assert drafter().draft([1, 1, 1], 100) == [1] * MAX_DRAFT_TOKENS


def test_draft_searches_appended_tokens() -> None:
    growing = drafter()
    text = [1, 2, 3, 4]
    assert growing.draft(text, 2) == []
    text += [8, 2, 3]
    assert growing.draft(text, 2) == [4, 8]


def test_drafting_starts_once_drafts_would_have_been_accepted() -> None:
    inactive = drafter(drafting=False)
    text = [1, 2, 3, 4, 5, 1]
    assert not inactive.should_draft(text)
    text.append(2)
    assert not inactive.should_draft(text)
    text.append(3)
    assert inactive.should_draft(text)


def test_should_draft_is_checked_at_intervals() -> None:
    inactive = drafter(check_interval=8, drafting=False)
    assert not inactive.should_draft([1, 2])
    active_lengths = [length for length in range(3, 20) if inactive.should_draft([1] * length)]
    assert active_lengths[0] == 2 + 8


def test_pauses_grow_after_rejections_and_shrink_after_acceptances() -> None:
    rejected = drafter()
    text = [1] * 10
    pauses = []
    for _ in range(4):
        rejected.record_acceptance(0, 8, len(text))
        before = len(text)
        while not rejected.should_draft(text):
            text.append(1)
        pauses.append(len(text) - before)
    assert pauses == [4, 8, 16, 32]
    rejected.record_acceptance(8, 8, len(text))
    for _ in range(3):  # accepted drafts make up for some rejected ones
        assert rejected.drafting
        rejected.record_acceptance(0, 8, len(text))
    before = len(text)
    while not rejected.should_draft(text):
        text.append(1)
    assert len(text) - before == 32


def test_pause_is_bounded() -> None:
    rejected = drafter()
    text = [1] * 10
    for _ in range(12):
        rejected.record_acceptance(0, 8, len(text))
        before = len(text)
        text += [1] * 256
        assert rejected.should_draft(text), before
