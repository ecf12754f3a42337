"""Errors on their way to another process, and an engine there that has stopped."""

from __future__ import annotations

import pickle

import pytest

from roseinfer.engine_client.protocol import to_picklable_error
from roseinfer.errors import RequestTooLarge


class Panic(BaseException):
    """A panic in Rust reaches Python like this: it is no ``Exception``."""


class Stubborn(Exception):
    """One that cannot be made again of its words."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as found:
        return found


def test_one_of_ours_stays_and_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    error = raised(RequestTooLarge("too large"))
    assert to_picklable_error(error) is error
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("error", [Panic("secret"), Stubborn("sec", "ret"), KeyboardInterrupt()])
def test_one_that_cannot_go_is_told_and_is_an_exception(error: BaseException) -> None:
    found = pickle.loads(pickle.dumps(to_picklable_error(raised(error))))
    assert isinstance(found, RuntimeError)
    assert str(found) == f"{type(error).__name__}: {error}"


def test_where_it_was_raised_is_said_here_but_not_what(capfd: pytest.CaptureFixture[str]) -> None:
    assert type(to_picklable_error(raised(KeyError("secret")))) is KeyError
    said = capfd.readouterr().err
    assert "KeyError" in said
    assert "test_portable_errors.py" in said
    assert "secret" not in said
