"""Names in an adapter that are spelled almost as one that the harness asks for.

An optional method that is misspelt is no error of Python's: it is never called, and all is green.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.base import Adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLOSE = 0.86
"""A little above what a word has in common with another that is two letters longer, as `append`
and `appended` are."""
_SHIPPED = "pytest_roseinfer."
_METHODS = (classmethod, staticmethod)


def refuse_misspelt(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` where a class defines a name that is likely meant to be another."""
    for name, value in _own(adapter):
        if meant := _meant(adapter, name, value):
            raise TypeError(
                f"{adapter.__name__} has {name}, which nothing asks for: did you mean {meant}? "
                "Begin the name with an underscore if it is your own"
            )


def _own(adapter: type[Adapter]) -> Iterator[tuple[str, Any]]:
    """Yield the public names that classes of the user's define, and no shipped one does.

    A base that is no adapter is left out: it may be a library's, with names for other ends.
    """
    for each in adapter.__mro__:
        if issubclass(each, Adapter) and not _is_shipped(each):
            for name, value in vars(each).items():
                if not name.startswith("_") and name not in _asked_for(adapter):
                    yield name, value


def _asked_for(adapter: type[Adapter]) -> dict[str, Any]:
    """Return the public names of the shipped bases, each as it was defined first."""
    shipped = filter(_is_shipped, reversed(adapter.__mro__))
    return {
        name: value
        for each in shipped
        for name, value in vars(each).items()
        if not name.startswith("_")
    }


def _is_shipped(each: type) -> bool:
    return each.__module__.startswith(_SHIPPED)


def _meant(adapter: type[Adapter], name: str, value: object) -> str | None:
    """Return the name that was probably meant.

    A method is taken for a method only, and a value for a value. Properties and classes are the
    user's own. So is what is spelled like a name that the class defines as well: both cannot be
    meant.
    """
    is_method = _is_method(value)
    if not is_method and (isinstance(value, type) or hasattr(value, "__get__")):
        return None
    alike = {
        known: _likeness(name, known)
        for known, theirs in _asked_for(adapter).items()
        if _is_method(theirs) == is_method and not _defines(adapter, known)
    }
    if is_method:
        for known in alike:
            if name in (f"{known}d", f"{known}ed"):  # `truncated` is a word of its own
                alike[known] = 0.0
    meant = max(alike, key=alike.__getitem__, default=None)
    return meant if meant and alike[meant] >= _CLOSE else None


def _is_method(value: object) -> bool:
    return isfunction(value) or isinstance(value, _METHODS)


def _defines(adapter: type[Adapter], known: str) -> bool:
    """Return True where a class of the user's has this name too."""
    return any(known in vars(each) for each in adapter.__mro__ if not _is_shipped(each))


def _likeness(said: str, known: str) -> float:
    """Return 1 for names that differ in case, in underscores or in the order of letters alone."""
    one, other = (each.replace("_", "").lower() for each in (said, known))
    if sorted(one) == sorted(other):
        return 1.0
    return SequenceMatcher(None, one, other).ratio()
