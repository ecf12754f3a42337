"""Validation of an adapter class, before a cache or engine is built."""

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

# Misspelt names
#
# Python raises no error for a misspelt optional method: it is never called, and all tests pass.


_CLOSE = 0.86
"""Minimum similarity of a misspelt name: a little above that of a word and one that is two letters
longer, such as `append` and `appended`."""
_SHIPPED = "pytest_roseinfer."
_METHODS = (classmethod, staticmethod)


def refuse_misspelt(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` for a name that is probably a misspelt one of the harness."""
    for name, value in _user_names(adapter):
        if meant := _closest_name(adapter, name, value):
            raise TypeError(
                f"{adapter.__name__} has {name}, which the harness does not use: did you mean "
                f"{meant}? Begin the name with an underscore if it is your own"
            )


def _user_names(adapter: type[Adapter]) -> Iterator[tuple[str, Any]]:
    """Yield public names that only user classes define, not shipped ones.

    A base that is not an adapter is left out: it may be a library's, with names of its own.
    """
    for each in adapter.__mro__:
        if issubclass(each, Adapter) and not _is_shipped(each):
            for name, value in vars(each).items():
                if not name.startswith("_") and name not in _known_names(adapter):
                    yield name, value


def _known_names(adapter: type[Adapter]) -> dict[str, Any]:
    """Return the public names of the declaring bases, each with its first definition."""
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
    """Return True for a base that declares adapter methods, and is not the user's own code."""
    return _is_shipped(each) or each in adapter.declaring()


def _closest_name(adapter: type[Adapter], name: str, value: object) -> str | None:
    """Return the name that was probably meant; None if the name is the user's own.

    A method is only compared with methods, and a value with values. Properties and classes are the
    user's own, and so is a name that resembles one which the class defines too.
    """
    is_method = _is_method(value)
    if not is_method and (isinstance(value, type) or hasattr(value, "__get__")):
        return None
    similarity = {
        known_name: _likeness(name, known_name)
        for known_name, definition in _known_names(adapter).items()
        if _is_method(definition) == is_method and not _defines(adapter, known_name)
    }
    if is_method:
        for known_name in similarity:
            if name in (
                f"{known_name}d",
                f"{known_name}ed",
            ):  # a participle such as `truncated` is intended
                similarity[known_name] = 0.0
    meant = max(similarity, key=similarity.__getitem__, default=None)
    return meant if meant and similarity[meant] >= _CLOSE else None


def _is_method(value: object) -> bool:
    return isfunction(value) or isinstance(value, _METHODS)


def _defines(adapter: type[Adapter], known_name: str) -> bool:
    """Return True if a user class also defines this name."""
    return any(known_name in vars(each) for each in adapter.__mro__ if not _names(adapter, each))


def _likeness(name: str, known_name: str) -> float:
    """Return the similarity of two names; 1 if only case, underscores or letter order differ."""
    one, other = (each.replace("_", "").lower() for each in (name, known_name))
    if sorted(one) == sorted(other):
        return 1.0
    return SequenceMatcher(None, one, other).ratio()


# Signatures of methods


_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def refuse_signatures(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` for methods that cannot be called with the harness's arguments."""
    if wrong := [*_check_constructor(adapter), *_not_called(adapter)]:
        raise TypeError("; ".join(wrong))


def _check_constructor(adapter: type[Adapter]) -> Iterator[str]:
    actual = _signature(adapter, "__init__")
    if actual and not _takes(actual, 0):
        yield (
            f"{adapter.__name__}.__init__ takes {_format_parameters(actual)}, and the harness "
            f"calls {adapter.__name__}(): build in make what needs them, or give them defaults"
        )


def _not_called(adapter: type[Adapter]) -> Iterator[str]:
    for name in filter(adapter.defines, (*adapter.required, *adapter.optional)):
        declaring = next(each for each in adapter.declaring() if name in vars(each))
        actual, expected = _signature(adapter, name), _signature(declaring, name)
        if actual is None or expected is None:
            continue
        if not (_takes(actual, len(expected.parameters)) and _in_order(actual, expected)):
            arguments = ", ".join(expected.parameters)
            yield (
                f"{adapter.__name__}.{name} takes ({_format_parameters(actual)}), and the harness "
                f"calls {name}({arguments})"
            )


def _signature(adapter: type, name: str) -> Signature | None:
    """Return the signature of a method without ``self``; None if Python cannot find it."""
    method: Any = getattr_static(adapter, name)
    bound = isinstance(method, staticmethod | classmethod)
    try:
        full = signature(getattr(adapter, name))
    except (TypeError, ValueError):
        return None
    parameters = [*full.parameters.values()]
    if bound or not parameters or parameters[0].kind is Parameter.VAR_POSITIONAL:
        return full
    return full.replace(parameters=parameters[1:])


def _takes(actual: Signature, arguments: int) -> bool:
    """Return True for a signature that accepts this number of positional arguments."""
    try:
        actual.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def _in_order(actual: Signature, expected: Signature) -> bool:
    """Return False for the expected names in another order; any other names are allowed."""
    names = [each.name for each in actual.parameters.values() if each.kind in _BY_PLACE]
    return sorted(names) != sorted(expected.parameters) or names == [*expected.parameters]


def _format_parameters(actual: Signature) -> str:
    return ", ".join(
        str(each.replace(annotation=Parameter.empty)) for each in actual.parameters.values()
    )


# Declared shapes


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


_RIGHT: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "dtypes": (is_dtype, 'names of torch dtypes, as in ("float32", "bfloat16")'),
    "head_counts": (_is_size, "numbers of 1 or more, as in (1, 8)"),
    "head_dims": (_is_size, "numbers of 1 or more, as in (64, 128)"),
    "block_sizes": (_is_size, "numbers of 1 or more, as in (16, 32)"),
}
"""Check of each listed value, and example of the right values, by attribute."""
_FEWEST = {"max_sequences": 6, "max_tokens": 16}
"""Least values that drawn histories need: their sequences at a time, and a few blocks of tokens."""


def _codes(dtypes: object) -> str:
    """Describe the missing tolerance of a dtype that is not floating-point; empty without one."""
    listed = dtypes if isinstance(dtypes, Sequence) else ()
    names = [each for each in listed if isinstance(each, str)]
    codes = [each for each in names if isinstance(getattr(torch, each, None), torch.dtype)]
    missing = [each for each in codes if not is_dtype(each)]
    return f"; {missing[0]} needs tolerance[{missing[0]!r}] as well" if missing else ""


def refuse_shapes(adapter: type[KVCacheAdapter]) -> None:
    """Raise ``TypeError`` for empty or invalid lists of dtypes and sizes, or invalid limits."""
    for name, (is_right, example) in _RIGHT.items():
        values = getattr(adapter, name)
        is_listed = isinstance(values, Sequence) and not isinstance(values, str)
        quantised = adapter.tolerance if name == "dtypes" else ()
        if not (
            is_listed and values and all(each in quantised or is_right(each) for each in values)
        ):
            raise TypeError(
                f"{adapter.__name__}.{name} is {values!r}: list what the cache can be built with, "
                f"the usual first: {example}{_codes(values)}"
            )
    for name, minimum in _FEWEST.items():
        refuse_bound(adapter, name, minimum)


def refuse_bound(adapter: type[Adapter], name: str, minimum: int) -> None:
    """Raise ``TypeError`` for a limit that is not a number, or below the ``minimum`` allowed."""
    limit = getattr(adapter, name)
    if limit is not None and not (_is_size(limit) and limit >= minimum):
        raise TypeError(
            f"{adapter.__name__}.{name} is {limit!r}: write a number of {minimum} or more, or None "
            "for unlimited"
        )


_FEWEST_REQUESTS = 6
"""Most requests at a time in drawn mixes, which an engine must allow."""


def refuse_mistakes(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` for a class that is not a usable adapter; the message says why."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        hint = ""
        if isinstance(adapter, Adapter):
            class_name = type(adapter).__name__
            hint = f": write conformance({class_name}), since each history gets a new cache"
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
        refuse_bound(adapter, "max_requests", _FEWEST_REQUESTS)
    if issubclass(adapter, KVCacheAdapter):
        refuse_shapes(adapter)
        if not isinstance(adapter.atomic_batches, bool):
            raise TypeError(
                f"{name}.atomic_batches is {adapter.atomic_batches!r}: write False if an append "
                "without room for all rows stores the rows before the first that does not fit, "
                "else True"
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
        settings = (*path.runs_with, *path.never_with, *path.aims)
        if unknown := {switch for each in settings for switch in each} - {*adapter.option_choices}:
            raise TypeError(
                f"{name}.paths[{path_name!r}] names {', '.join(sorted(unknown))}, which "
                "option_choices has no values for"
            )
        usual = {name: values[0] for name, values in adapter.option_choices.items()}
        for aim in path.settings_to_draw:
            if exclusion := path.describe_exclusion({**usual, **aim}):
                raise TypeError(
                    f"{name}.paths[{path_name!r}] has an aim, {aim!r}, that excludes it: it is a "
                    f"path {exclusion}"
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
