"""A frame: what a layer of a cache holds between two steps, as plain data."""

from __future__ import annotations

from typing import TypedDict


class Wrong(TypedDict):
    """A token that reads back wrong."""

    position: int
    found: str
    """What is there, as short as tokens are named."""
    words: str


class Row(TypedDict):
    """One sequence."""

    name: int
    state: str
    """How it is away; empty for one that is there."""
    tokens: list[str]
    """What it must hold, by position, as in ``sequence.token``."""
    unwritten: int
    """How many of the last tokens have room and are not written yet."""
    blocks: list[int | None] | None
    """Its table, with None for a block that was given back; None if no table can be read."""
    given_back: int
    """How many of its first blocks left the window of this layer."""
    wrong: list[Wrong]
    marked: bool
    """It is wrong, and no token of it alone."""


class Block(TypedDict):
    """One block that the cache's books or tables name."""

    number: int
    states: list[str]
    """Some of ``held``, ``shared``, ``free``, ``cached`` and ``poisoned``; or ``counted``, for one
    that is not free and in no table."""
    refcount: int | None
    """By the cache's own books."""
    holders: list[int]
    """The sequences whose tables name it."""
    marked: bool
    """It is wrong."""


class Frame(TypedDict):
    step: int
    """The number of the step that led here; 0 before the first."""
    words: str
    refused: str
    """Why the step was refused, if it was."""
    sequences: list[Row]
    blocks: list[Block]
