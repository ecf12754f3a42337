"""An answer of an adapter that is none, and how a failure tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeGuard

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST = 80
"""More characters of an answer say no more."""
COUNTS = "a mapping of names to how often each was counted"


class WrongAnswer(TypeError):
    """A method of an adapter returned what it must not; the message says what it should."""


def refuse(call: str, shown: object, due: str) -> NoReturn:
    raise WrongAnswer(f"{call} returned {in_words(shown)}: return {due}")


def is_number(value: object) -> bool:
    """Return True for an integer, be it NumPy's; a tensor is no key of a dictionary."""
    return type(value) is int or (
        isinstance(value, SupportsIndex) and not isinstance(value, bool | torch.Tensor)
    )


def are_numbers(values: Iterable[object]) -> bool:
    return all(map(is_number, values))


def are_counts(shown: object) -> TypeGuard[Mapping[Any, int]]:
    return isinstance(shown, Mapping) and are_numbers(shown.values())


def in_words(shown: object) -> str:
    """Return what was shown, cut short; of tensors their shapes."""
    if isinstance(shown, torch.Tensor):
        return f"a tensor of shape {list(shown.shape)}"
    if isinstance(shown, tuple | list) and any(isinstance(each, torch.Tensor) for each in shown):
        return f"a {type(shown).__name__} of {', '.join(map(in_words, shown))}"
    said = " ".join(repr(shown).split())
    return said if len(said) <= _MOST else f"{said[:_MOST]}..."
