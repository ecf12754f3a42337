"""Errors sent to another process."""

from __future__ import annotations

import pickle

import pytest

from roseinfer.engine_client.protocol import to_picklable_error
from roseinfer.errors import RequestTooLarge


class Panic(BaseException):
    """Rust panic as it reaches Python: not an ``Exception``."""


class UnpicklableError(Exception):
    """Error that cannot be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def raise_and_catch(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_roseinfer_error_is_sent_unchanged_and_not_logged(
    capfd: pytest.CaptureFixture[str],
) -> None:
    error = raise_and_catch(RequestTooLarge("too large"))
    assert to_picklable_error(error) is error
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "error", [Panic("secret"), UnpicklableError("sec", "ret"), KeyboardInterrupt()]
)
def test_error_that_cannot_be_sent_becomes_a_runtime_error(error: BaseException) -> None:
    restored = pickle.loads(pickle.dumps(to_picklable_error(raise_and_catch(error))))
    assert isinstance(restored, RuntimeError)
    assert str(restored) == f"{type(error).__name__}: {error}"


def test_unexpected_error_is_logged_with_its_place_and_without_values(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert type(to_picklable_error(raise_and_catch(KeyError("secret")))) is KeyError
    stderr = capfd.readouterr().err
    assert "KeyError" in stderr
    assert "test_portable_errors.py" in stderr
    assert "secret" not in stderr
