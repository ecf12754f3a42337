"""Errors go from process to process as what they are."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from roseinfer import errors
from roseinfer.errors import EngineRestarting, OutOfBlocks, RoseinferError

if TYPE_CHECKING:
    from collections.abc import Iterator

CAUSE = MemoryError("no room")
MADE_OF = {
    "OutOfBlocks": {"needed": 3, "free": 1, "where": "layer 0"},
    "StepFailed": {"cause": CAUSE},
    "DetokenizationFailed": {"cause": CAUSE},
    "EngineStopped": {"what": "the engine stopped", "cause": CAUSE},
    "EngineRestarting": {"what": "it is started again", "retry_after": 7},
    "RanksFailed": {"what": "rank 1 has ended", "cause": CAUSE},
}
"""What those are made of that take anything but words."""


def kinds(root: type[RoseinferError]) -> Iterator[type[RoseinferError]]:
    yield root
    for kind in root.__subclasses__():
        yield from kinds(kind)


@pytest.mark.parametrize("kind", [*kinds(RoseinferError)], ids=lambda kind: kind.__name__)
def test_one_that_was_pickled_says_the_same(kind: type[RoseinferError]) -> None:
    if kind.__name__ in MADE_OF:
        error = kind(**MADE_OF[kind.__name__])  # type: ignore[arg-type]
    else:
        error = (
            kind("what is wrong") if kind.__name__ != "_ErrorWithCause" else kind("wrong", CAUSE)
        )
    read = pickle.loads(pickle.dumps(error))
    assert type(read) is kind
    assert (str(read), read.args) == (str(error), error.args)


def test_the_whole_tree_was_looked_at() -> None:
    assert {kind.__name__ for kind in kinds(RoseinferError)} >= {
        name
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, RoseinferError)
    }


def test_what_it_knows_beside_words_is_kept() -> None:
    read = pickle.loads(pickle.dumps(OutOfBlocks(needed=3, free=1, where="layer 0")))
    assert (read.needed, read.free) == (3, 1)
    later = EngineRestarting("it is started again", retry_after=7)
    assert pickle.loads(pickle.dumps(later)).retry_after == 7
