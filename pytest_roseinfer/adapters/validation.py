"""Mistakes in an adapter class that show before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from inspect import Parameter, Signature, getattr_static, isfunction, signature
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.capabilities.cache_data import FastPath, is_dtype
from pytest_roseinfer.capabilities.capability import Traits

if TYPE_CHECKING:
    from collections.abc import Iterator

# Names in an adapter that are spelled almost as one that the harness asks for.
#
# An optional method that is misspelt is no error of Python's: it is never called, and all is green.


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
    return {
        name: value
        for each in reversed(adapter.__mro__)
        if _names(adapter, each)
        for name, value in vars(each).items()
        if not name.startswith("_")
    }


def _is_shipped(each: type) -> bool:
    return each.__module__.startswith(_SHIPPED)


def _names(adapter: type[Adapter], each: type) -> bool:
    """Return True for a base that says what may be defined, and is none of the user's own code."""
    return _is_shipped(each) or each in adapter.declaring()


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
    return any(known in vars(each) for each in adapter.__mro__ if not _names(adapter, each))


def _likeness(said: str, known: str) -> float:
    """Return 1 for names that differ in case, in underscores or in the order of letters alone."""
    one, other = (each.replace("_", "").lower() for each in (said, known))
    if sorted(one) == sorted(other):
        return 1.0
    return SequenceMatcher(None, one, other).ratio()


# Methods of an adapter that cannot be called with what the harness hands them.


_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def refuse_signatures(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` for methods that take more, less or in another order than is handed."""
    if wrong := [*_not_made(adapter), *_not_called(adapter)]:
        raise TypeError("; ".join(wrong))


def _not_made(adapter: type[Adapter]) -> Iterator[str]:
    own = _signature(adapter, "__init__")
    if own and not _takes(own, 0):
        yield (
            f"{adapter.__name__}.__init__ takes {_listed(own)}, and the harness calls "
            f"{adapter.__name__}(): build in make what needs them, or give them defaults"
        )


def _not_called(adapter: type[Adapter]) -> Iterator[str]:
    for name in filter(adapter.defines, (*adapter.required, *adapter.optional)):
        declaring = next(each for each in adapter.declaring() if name in vars(each))
        own, due = _signature(adapter, name), _signature(declaring, name)
        if own and due and not (_takes(own, len(due.parameters)) and _in_order(own, due)):
            handed = ", ".join(due.parameters)
            yield (
                f"{adapter.__name__}.{name} takes ({_listed(own)}), and the harness calls "
                f"{name}({handed})"
            )


def _signature(adapter: type, name: str) -> Signature | None:
    """Return what a method is called with; None where Python cannot say."""
    method: Any = getattr_static(adapter, name)
    bound = isinstance(method, staticmethod | classmethod)
    try:
        found = signature(getattr(adapter, name))
    except (TypeError, ValueError):
        return None
    named = [*found.parameters.values()]
    if bound or not named or named[0].kind is Parameter.VAR_POSITIONAL:
        return found
    return found.replace(parameters=named[1:])


def _takes(own: Signature, handed: int) -> bool:
    try:
        own.bind(*[None] * handed)
    except TypeError:
        return False
    return True


def _in_order(own: Signature, due: Signature) -> bool:
    """Return False for the same names in another order; other names are the user's own."""
    named = [each.name for each in own.parameters.values() if each.kind in _BY_PLACE]
    return sorted(named) != sorted(due.parameters) or named == [*due.parameters]


def _listed(own: Signature) -> str:
    return ", ".join(
        str(each.replace(annotation=Parameter.empty)) for each in own.parameters.values()
    )


# The shapes that an adapter says its cache can be built with, and what is no such saying.


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


_RIGHT: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "dtypes": (is_dtype, 'names of torch dtypes, as in ("float32", "bfloat16")'),
    "head_counts": (_is_size, "numbers from 1 on, as in (1, 8)"),
    "head_dims": (_is_size, "numbers from 1 on, as in (64, 128)"),
    "block_sizes": (_is_size, "numbers from 1 on, as in (16, 32)"),
}
"""For each attribute, what holds for all that it lists, and what to write."""
_FEWEST = {"most_sequences": 6, "most_tokens": 16}
"""What the drawn histories need: so many sequences at a time, and a few blocks of tokens."""


def _codes(said: object) -> str:
    """Say what is missing where one of the dtypes is one of codes."""
    named = [each for each in said if isinstance(each, str)] if isinstance(said, Sequence) else []
    codes = [each for each in named if isinstance(getattr(torch, each, None), torch.dtype)]
    missing = [each for each in codes if not is_dtype(each)]
    return f"; {missing[0]} needs tolerance[{missing[0]!r}] as well" if missing else ""


def refuse_shapes(adapter: type[KVCacheAdapter]) -> None:
    """Raise ``TypeError`` where a cache can be built with nothing, or with what is no shape."""
    for name, (is_right, example) in _RIGHT.items():
        said = getattr(adapter, name)
        listed = isinstance(said, Sequence) and not isinstance(said, str)
        named = adapter.tolerance if name == "dtypes" else ()
        if not (listed and said and all(value in named or is_right(value) for value in said)):
            raise TypeError(
                f"{adapter.__name__}.{name} is {said!r}: list what the cache can be built with, "
                f"the usual first: {example}{_codes(said)}"
            )
    for name, least in _FEWEST.items():
        refuse_bound(adapter, name, least)


def refuse_bound(adapter: type[Adapter], name: str, least: int) -> None:
    """Raise ``TypeError`` where a bound is no number, or fewer than what is drawn."""
    said = getattr(adapter, name)
    if said is not None and not (_is_size(said) and said >= least):
        raise TypeError(
            f"{adapter.__name__}.{name} is {said!r}: write a number from {least} on, or None "
            "for no bound"
        )


_FEWEST_REQUESTS = 6
"""Drawn mixes have so many at a time."""


def refuse_mistakes(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` for a class that is no usable adapter; the message says why."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        hint = ""
        if isinstance(adapter, Adapter):
            made = type(adapter).__name__
            hint = f": write conformance({made}), for a cache is made anew for every history"
        raise TypeError(f"conformance() takes a subclass of KVCacheAdapter, not {adapter!r}{hint}")
    name = adapter.__name__
    _refuse_renamed(adapter)
    refuse_misspelt(adapter)
    missing = [method for method in adapter.required if not adapter.defines(method)]
    if "append" in missing and "append_many" in adapter.abilities:
        missing.remove("append")
    if missing:
        raise TypeError(f"{name} must define {', '.join(missing)}")
    refuse_signatures(adapter)
    if not isinstance(adapter.fast_interpreter, bool):
        raise TypeError(
            f"{name}.fast_interpreter is {adapter.fast_interpreter!r}: write True or False"
        )
    if issubclass(adapter, EngineAdapter):
        refuse_bound(adapter, "most_requests", _FEWEST_REQUESTS)
    if issubclass(adapter, KVCacheAdapter):
        refuse_shapes(adapter)
        if not isinstance(adapter.atomic_batches, bool):
            raise TypeError(
                f"{name}.atomic_batches is {adapter.atomic_batches!r}: write False if an append "
                "that finds no room stores the rows ahead of the one that found none, else True"
            )
    for capability in adapter.capabilities:
        for refuse in capability.refuse:
            refuse(adapter)
    for capability in adapter.capabilities:
        for method in filter(adapter.abilities.__contains__, capability.needs):
            needed = capability.needs[method]
            if lacking := [other for other in needed if not adapter.defines(other)]:
                raise TypeError(
                    f"{name} defines {method} and must then define {', '.join(lacking)} too"
                )
    for path_name, path in adapter.paths.items():
        if not isinstance(path, FastPath):
            twin = repr(path) if isinstance(path, str) else "..."
            raise TypeError(
                f"{name}.paths[{path_name!r}] is {path!r}: write FastPath(equals={twin})"
            )
        settings = (*path.runs_with, *path.never_with)
        if unknown := {switch for each in settings for switch in each} - {*adapter.option_choices}:
            raise TypeError(
                f"{name}.paths[{path_name!r}] names {', '.join(sorted(unknown))}, which "
                "option_choices has no values for"
            )


def _refuse_renamed(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` for a renamed attribute, and for traits of another type."""
    for renamed in (adapter._renamed, *(each.renamed for each in adapter.capabilities)):
        for old, new in renamed.items():
            if hasattr(adapter, old):
                raise TypeError(f"{adapter.__name__}.{old} was renamed: write {new}")
    for capability in adapter.capabilities:
        for name, default in vars(capability.methods).items():
            value = getattr(adapter, name)
            if isinstance(default, Traits) and not isinstance(value, type(default)):
                raise TypeError(
                    f"{adapter.__name__}.{name} is {value!r}: write {type(default).__name__}(...)"
                )
