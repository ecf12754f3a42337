"""Pickling of errors between processes."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from roseinfer import errors
from roseinfer.errors import EngineRestarting, OutOfBlocks, RoseinferError

if TYPE_CHECKING:
    from collections.abc import Iterator

CAUSE = MemoryError("no room")
ARGUMENTS = {
    "OutOfBlocks": {"needed": 3, "free": 1, "owner": "layer 0"},
    "StepFailed": {"cause": CAUSE},
    "DetokenizationFailed": {"cause": CAUSE},
    "EngineStopped": {"message": "the engine stopped", "cause": CAUSE},
    "EngineRestarting": {"message": "it is started again", "retry_after": 7},
    "RanksFailed": {"message": "rank 1 has ended", "cause": CAUSE},
}
"""Arguments of errors that take more than a message."""


def error_classes(root: type[RoseinferError]) -> Iterator[type[RoseinferError]]:
    yield root
    for error_class in root.__subclasses__():
        yield from error_classes(error_class)


@pytest.mark.parametrize(
    "error_class", [*error_classes(RoseinferError)], ids=lambda error_class: error_class.__name__
)
def test_pickled_error_keeps_its_message_and_arguments(error_class: type[RoseinferError]) -> None:
    if error_class.__name__ in ARGUMENTS:
        error = error_class(**ARGUMENTS[error_class.__name__])  # type: ignore[arg-type]
    else:
        error = (
            error_class("what is wrong")
            if error_class.__name__ != "_ErrorWithCause"
            else error_class("wrong", CAUSE)
        )
    unpickled = pickle.loads(pickle.dumps(error))
    assert type(unpickled) is error_class
    assert (str(unpickled), unpickled.args) == (str(error), error.args)


def test_error_classes_include_the_whole_module() -> None:
    assert {error_class.__name__ for error_class in error_classes(RoseinferError)} >= {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, RoseinferError)
    }


def test_pickled_error_keeps_its_attributes() -> None:
    unpickled = pickle.loads(pickle.dumps(OutOfBlocks(needed=3, free=1, owner="layer 0")))
    assert (unpickled.needed, unpickled.free) == (3, 1)
    restarting = EngineRestarting("it is started again", retry_after=7)
    assert pickle.loads(pickle.dumps(restarting)).retry_after == 7
