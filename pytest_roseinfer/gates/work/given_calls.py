"""What a test gives to be called gets no arguments; what cannot be called so is refused."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.gate import CannotCompare

if TYPE_CHECKING:
    from collections.abc import Mapping


def require_calls(needed: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """Raise where what was given by one of these names cannot be called; None may be optional."""
    given = {name: call for name, call in optional.items() if call is not None}
    for name, call in {**needed, **given}.items():
        _require_call(name, call)


def _require_call(name: str, call: object) -> None:
    if not callable(call):
        raise CannotCompare(f"{name}= must be a function, and is {call!r}")
    with suppress(ValueError):  # of a function in C that does not say what it takes
        signature = inspect.signature(call)
        try:
            signature.bind()
        except TypeError as error:
            raise CannotCompare(f"{name}= is called without arguments: {error}") from None
