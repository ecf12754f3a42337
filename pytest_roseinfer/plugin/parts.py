"""Cuts long tests of ``conformance()`` up on a GPU, where several processes share them.

There a search waits mostly for compilers and for the GPU's answers.
"""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from pytest_roseinfer.plugin import markers
from pytest_roseinfer.settings import Part

if TYPE_CHECKING:
    import pytest

_PARAMETER = "roseinfer_part"


def cut_up(metafunc: pytest.Metafunc) -> None:
    """Make a test of each part: ``test_histories[1of2]``."""
    found: list[Part] = metafunc.cls.parts(metafunc.definition.originalname)
    if len(found) > 1:
        metafunc.fixturenames.append(_PARAMETER)  # no test of a user's takes it as an argument
        metafunc.parametrize(_PARAMETER, found, ids=str)


def long_beside_short(items: list[pytest.Item]) -> None:
    """Order tests so that no process is handed two long ones while others have none.

    A worker of pytest-xdist is told of its next test before it begins one, and keeps it.
    """
    at = [place for place, item in enumerate(items) if markers.is_shipped(item)]
    shipped = [items[place] for place in at]
    parts = [item for item in shipped if part_of(item).of > 1]
    others = [item for item in shipped if part_of(item).of == 1]
    pairs = chain.from_iterable(zip_longest(parts, others))
    for place, item in zip(at, filter(None, pairs), strict=True):
        items[place] = item


def part_of(item: pytest.Item) -> Part:
    """Return the part that a test is, which is the whole for most."""
    call = getattr(item, "callspec", None)
    part: Part = call.params.get(_PARAMETER, Part()) if call else Part()
    return part
