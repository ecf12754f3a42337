"""Validation of the types of values that adapter methods return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeGuard, TypeVar

from pytest_roseinfer.capabilities.cache_data import Ledger

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    from pytest_roseinfer.capabilities import numpy as np
    from pytest_roseinfer.capabilities import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Errors


_MOST = 80
"""Most characters of a value in a message."""
COUNTS = "a mapping of names to how often each was counted"


class InvalidReturnValue(TypeError):
    """Error for a value of a wrong type that an adapter method returned; names the right type."""


def raise_invalid(call: str, value: object, expected: str) -> NoReturn:
    """Raise ``InvalidReturnValue`` for the value that a call returned."""
    raise InvalidReturnValue(f"{call} returned {describe_value(value)}: return {expected}")


def is_number(value: object) -> bool:
    """Return True for an integer, NumPy's too, but not for a tensor, which is no dictionary key."""
    return type(value) is int or (
        isinstance(value, SupportsIndex) and not isinstance(value, bool | torch.Tensor)
    )


def are_numbers(values: Iterable[object]) -> bool:
    return all(map(is_number, values))


def are_counts(shown: object) -> TypeGuard[Mapping[Any, int]]:
    return isinstance(shown, Mapping) and are_numbers(shown.values())


def describe_value(shown: object) -> str:
    """Describe a value, cut to 80 characters; tensors by their shapes."""
    if isinstance(shown, torch.Tensor):
        return f"a tensor of shape {list(shown.shape)}"
    if isinstance(shown, tuple | list) and any(isinstance(each, torch.Tensor) for each in shown):
        return f"a {type(shown).__name__} of {', '.join(map(describe_value, shown))}"
    text = " ".join(repr(shown).split())
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


# Caches


Pair = tuple["torch.Tensor", "torch.Tensor"]


def table(call: str, shown: Any) -> list[int | None]:
    """Return a list of block numbers as a list; raise ``InvalidReturnValue`` for anything else."""
    listed = isinstance(shown, Iterable) and not isinstance(shown, str | bytes | Mapping)
    blocks = list(shown) if listed else [shown]
    if not (listed and all(block is None or is_number(block) for block in blocks)):
        raise_invalid(call, shown, "a list of block numbers")
    return blocks


def ledger(call: str, shown: Any) -> Ledger:
    """Return a ledger with valid fields; raise ``InvalidReturnValue`` for anything else."""
    if not isinstance(shown, Ledger):
        raise_invalid(call, shown, "a Ledger")
    refcounts = shown.refcounts
    if not (isinstance(refcounts, Mapping) and are_numbers((*refcounts, *refcounts.values()))):
        raise InvalidReturnValue(
            f"{call} returned a Ledger whose refcounts are {describe_value(refcounts)}: "
            "map each block that is held to the number of its holders"
        )
    for name in ("free", "cached"):
        blocks = getattr(shown, name)
        if not (isinstance(blocks, Collection) and are_numbers(blocks)):
            raise InvalidReturnValue(
                f"{call} returned a Ledger whose {name} is {describe_value(blocks)}: list block "
                "numbers"
            )
    for name in ("total", "swapped", "num_free"):
        blocks = getattr(shown, name)
        if not (is_number(blocks) or (blocks is None and name != "total")):
            raise InvalidReturnValue(
                f"{call} returned a Ledger whose {name} is {describe_value(blocks)}: a number of "
                "blocks"
            )
    return shown


def pair(call: str, shown: Any) -> Pair:
    """Return keys and values as two tensors; one tensor may hold both, keys first."""
    if not (isinstance(shown, torch.Tensor) and shown.dim() == 4 and len(shown) == 2):
        listed = isinstance(shown, tuple | list) and len(shown) == 2
        if not (listed and all(isinstance(each, torch.Tensor) for each in shown)):
            raise_invalid(call, shown, "keys and values, two tensors")
    keys, values = shown
    return keys, values


def storage(call: str, shown: Any, dimensions: Collection[int]) -> Pair:
    """Return two views of all layers, as ``pair`` does, with one of these numbers of dimensions."""
    in_one = isinstance(shown, torch.Tensor) and shown.dim() and len(shown) == 2
    views = (shown[0], shown[1]) if in_one else pair(call, shown)
    if not all(view.dim() in dimensions for view in views):
        raise_invalid(call, shown, f"views of {' or '.join(map(str, dimensions))} dimensions")
    return views


def require_dimensions(call: str, view: torch.Tensor, due: Mapping[str, int | None]) -> None:
    """Check the sizes of a view, which may lack the last dimensions; None allows any size."""
    sizes = zip(view.shape, due.values(), strict=False)
    if any(size not in (actual, None) for actual, size in sizes):
        names = [name if size is None else f"{name}={size}" for name, size in due.items()]
        raise_invalid(call, view, f"views [{', '.join(names[: view.dim()])}]")


def require_same_storage(call: str, view: torch.Tensor, again: torch.Tensor) -> None:
    """Check that two calls return views of the same memory, not copies."""
    if view.data_ptr() != again.data_ptr():
        raise InvalidReturnValue(
            f"{call} returned a new copy each time: return views of the tensors that the cache "
            "itself writes to, whose free blocks the harness poisons"
        )


def count(call: str, shown: Any) -> int:
    if not is_number(shown):
        raise_invalid(call, shown, "a number of tokens")
    return int(shown)


def counts(call: str, shown: Any) -> Mapping[str, int]:
    if not are_counts(shown):
        raise_invalid(call, shown, COUNTS)
    return shown


def attention(call: str, shown: Any) -> torch.Tensor:
    if not isinstance(shown, torch.Tensor):
        raise_invalid(call, shown, "a tensor like the query")
    return shown


def reservation(shown: object, error: Exception) -> InvalidReturnValue | None:
    """Return an error if ``fill`` may have raised because ``reserve`` returned None."""
    if shown is None and isinstance(error, TypeError | AttributeError):
        raised = f"{type(error).__name__}: {error}"
        return InvalidReturnValue(
            f"reserve() returned None, and fill(None, key, value) raised {raised}: "
            "return the handle that fill needs from reserve"
        )
    return None


# Engines, whose return values are declared next to their methods


@dataclass(frozen=True, slots=True)
class ReturnCheck:
    """A check of the value that an adapter method returns."""

    accepts: Callable[[Any], bool]
    description: str
    least: str
    """Adapter attribute that holds the least length; empty for any length."""


def returns(accepts: Callable[[Any], bool], words: str, least: str = "") -> Callable[..., Any]:
    """Declare the value that an adapter method must return, as a check and in words."""

    def declare(method: _Method) -> _Method:
        method.__dict__["answer"] = ReturnCheck(accepts, words, least)
        return method

    return declare


def checks_of(adapter: type[Any]) -> dict[str, Callable[..., Any]]:
    """Return checked versions of the methods of an adapter class, by their names.

    The first argument of each is a function that returns the bound method; the others are the
    method's own.
    """
    return {
        name: partial(_checked, each.answer, getattr(adapter, each.answer.least, 0), adapter, name)
        for name, each in adapter.declared.items()
        if hasattr(each, "answer")
    }


def _checked(
    answer: ReturnCheck,
    least: int,
    adapter: type[Any],
    name: str,
    method: Callable[[], Any],
    *arguments: Any,
    **named: Any,
) -> Any:
    shown = method()(*arguments, **named)
    if not answer.accepts(shown) or (least and len(shown) < least):
        raise_invalid(call_of(adapter, name), shown, answer.description.format(least=least))
    return shown


def call_of(adapter: type[Any], name: str) -> str:
    """Return the call of a method with its parameter names, for messages."""
    _, *parameters = signature(adapter.declared[name]).parameters
    return f"{name}({', '.join(parameters)})"


def floats(shown: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a list of numbers as an array; raise ``TypeError`` for anything else."""
    if isinstance(shown, torch.Tensor) and shown.is_floating_point():
        shown = shown.detach().cpu().double()  # NumPy reads no device memory, nor bfloat16
    array = np.asarray(shown)
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise TypeError(f"no list of numbers: {shown!r}")
    return array.astype(np.float64)


def elements(shown: Any) -> list[Any] | None:
    """Return the elements of a list, a tuple or an array; None for anything else."""
    if isinstance(shown, str | bytes | Mapping | Set) or not isinstance(shown, Collection):
        return None
    try:
        return list(shown)
    except TypeError:  # an array without a dimension
        return None


def list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check of lists that applies a check to each element."""

    def check(shown: Any) -> bool:
        listed = elements(shown)
        return listed is not None and all(map(accepts, listed))

    return check


def is_text(shown: Any) -> bool:
    return isinstance(shown, str)


def is_bool(shown: Any) -> bool:
    return isinstance(shown, bool | np.bool_)


def is_float(shown: Any) -> bool:
    return are_floats([shown])


def are_floats(shown: Any) -> bool:
    try:
        floats(shown)
    except (TypeError, ValueError):
        return False
    return True


are_tokens = list_of(is_number)
