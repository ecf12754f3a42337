"""Validation of the types of values that adapter methods return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeGuard, TypeVar

from pytest_roseinfer.capabilities.cache_data import Ledger, Transfer

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

    @property
    def kind(self) -> str:
        """Kind of difference, as in ``Finding.kind``: it names the method."""
        return f"returned by {str(self).partition('(')[0]}"


def raise_invalid(call: str, value: object, expected: str) -> NoReturn:
    """Raise ``InvalidReturnValue`` for the value that a call returned."""
    raise InvalidReturnValue(f"{call} returned {describe_value(value)}: return {expected}")


def is_number(value: object) -> bool:
    """Return True for an integer of Python or NumPy; a tensor cannot be a dictionary key."""
    return type(value) is int or (
        isinstance(value, SupportsIndex) and not isinstance(value, bool | torch.Tensor)
    )


def are_numbers(values: Iterable[object]) -> bool:
    return all(map(is_number, values))


def are_counts(value: object) -> TypeGuard[Mapping[Any, int]]:
    return isinstance(value, Mapping) and are_numbers(value.values())


def describe_value(value: object) -> str:
    """Describe a value, cut to 80 characters; tensors by their shapes."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list) and any(isinstance(each, torch.Tensor) for each in value):
        return f"a {type(value).__name__} of {', '.join(map(describe_value, value))}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


# Caches


Pair = tuple["torch.Tensor", "torch.Tensor"]


def table(call: str, value: Any) -> list[int | None]:
    """Return a list of block numbers as a list; raise ``InvalidReturnValue`` for anything else."""
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    blocks = list(value) if listed else [value]
    if not (listed and all(block is None or is_number(block) for block in blocks)):
        raise_invalid(call, value, "a list of block numbers")
    return blocks


def ledger(call: str, value: Any) -> Ledger:
    """Return a ledger with valid fields; raise ``InvalidReturnValue`` for anything else."""
    if not isinstance(value, Ledger):
        raise_invalid(call, value, "a Ledger")
    refcounts = value.refcounts
    if not (isinstance(refcounts, Mapping) and are_numbers((*refcounts, *refcounts.values()))):
        raise InvalidReturnValue(
            f"{call} returned a Ledger whose refcounts are {describe_value(refcounts)}: "
            "map each block that is held to the number of its holders"
        )
    for name in ("free", "cached"):
        blocks = getattr(value, name)
        if not (isinstance(blocks, Collection) and are_numbers(blocks)):
            raise InvalidReturnValue(
                f"{call} returned a Ledger whose {name} is {describe_value(blocks)}: list block "
                "numbers"
            )
    for name in ("total", "swapped", "num_free"):
        blocks = getattr(value, name)
        if not ((blocks is None and name != "total") or is_number(blocks)):
            raise InvalidReturnValue(
                f"{call} returned a Ledger whose {name} is {describe_value(blocks)}: a number of "
                "blocks"
            )
    return value


def transfers(value: Any) -> list[Transfer]:
    """Return transfers as a list; raise ``InvalidReturnValue`` for anything else."""
    listed = isinstance(value, Collection) and all(isinstance(each, Transfer) for each in value)
    if not (listed and all(are_numbers([*each.blocks, *each.held_blocks]) for each in value)):
        raise_invalid("transfers_in_flight()", value, "a list of Transfer, with block numbers")
    if len({each.id for each in value}) < len(value):
        raise_invalid("transfers_in_flight()", value, "transfers of different ids")
    return list(value)


def pair(call: str, value: Any) -> Pair:
    """Return keys and values as two tensors; one tensor may hold both, keys first."""
    if not (isinstance(value, torch.Tensor) and value.dim() == 4 and len(value) == 2):
        listed = isinstance(value, tuple | list) and len(value) == 2
        if not (listed and all(isinstance(each, torch.Tensor) for each in value)):
            raise_invalid(call, value, "keys and values, two tensors")
    keys, values = value
    return keys, values


def storage(call: str, value: Any, dimensions: Collection[int]) -> Pair:
    """Return two views of all layers, as ``pair`` does, with one of these numbers of dimensions."""
    in_one = isinstance(value, torch.Tensor) and value.dim() and len(value) == 2
    views = (value[0], value[1]) if in_one else pair(call, value)
    if not all(view.dim() in dimensions for view in views):
        raise_invalid(call, value, f"views of {' or '.join(map(str, dimensions))} dimensions")
    return views


def require_dimensions(call: str, view: torch.Tensor, expected: Mapping[str, int | None]) -> None:
    """Check the sizes of a view, which may lack the last dimensions; None allows any size."""
    sizes = zip(view.shape, expected.values(), strict=False)
    if any(size not in (actual, None) for actual, size in sizes):
        names = [name if size is None else f"{name}={size}" for name, size in expected.items()]
        raise_invalid(call, view, f"views [{', '.join(names[: view.dim()])}]")


def require_same_storage(call: str, view: torch.Tensor, second: torch.Tensor) -> None:
    """Check that two calls return views of the same memory, not copies."""
    if view.data_ptr() != second.data_ptr():
        raise InvalidReturnValue(
            f"{call} returned a new copy each time: return views of the tensors that the cache "
            "itself writes to, whose free blocks the harness poisons"
        )


def count(call: str, value: Any) -> int:
    if not is_number(value):
        raise_invalid(call, value, "a number of tokens")
    return int(value)


def counts(call: str, value: Any) -> Mapping[str, int]:
    if not are_counts(value):
        raise_invalid(call, value, COUNTS)
    return value


def attention(call: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise_invalid(call, value, "a tensor like the query")
    return value


def reservation(value: object, error: Exception) -> InvalidReturnValue | None:
    """Return an error if ``fill`` may have raised because ``reserve`` returned None."""
    if value is None and isinstance(error, TypeError | AttributeError):
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


def returns(
    accepts: Callable[[Any], bool], requirement: str, minimum: str = ""
) -> Callable[..., Any]:
    """Declare the value that an adapter method must return, as a check and in words."""

    def declare(method: _Method) -> _Method:
        method.__dict__["answer"] = ReturnCheck(accepts, requirement, minimum)
        return method

    return declare


def checks_of(adapter: type[Any]) -> dict[str, Callable[..., Any]]:
    """Return checked versions of the methods of an adapter class, by their names.

    The first argument of each is a function that returns the bound method; the others are the
    method's own.
    """
    return {
        name: partial(
            _call_and_check, each.answer, getattr(adapter, each.answer.least, 0), adapter, name
        )
        for name, each in adapter.declared.items()
        if hasattr(each, "answer")
    }


def _call_and_check(
    answer: ReturnCheck,
    minimum: int,
    adapter: type[Any],
    name: str,
    method: Callable[[], Any],
    *arguments: Any,
    **named: Any,
) -> Any:
    shown = method()(*arguments, **named)
    if not answer.accepts(shown) or (minimum and len(shown) < minimum):
        raise_invalid(call_of(adapter, name), shown, answer.description.format(least=minimum))
    return shown


def call_of(adapter: type[Any], name: str) -> str:
    """Return the call of a method with its parameter names, for messages."""
    _, *parameters = signature(adapter.declared[name]).parameters
    return f"{name}({', '.join(parameters)})"


def floats(value: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a list of numbers as an array; raise ``TypeError`` for anything else."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        value = value.detach().cpu().double()  # NumPy reads no device memory, nor bfloat16
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise TypeError(f"no list of numbers: {value!r}")
    return array.astype(np.float64)


def elements(value: Any) -> list[Any] | None:
    """Return the elements of a list, a tuple or an array; None for anything else."""
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Collection):
        return None
    try:
        return list(value)
    except TypeError:  # an array without a dimension
        return None


def list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check of lists that applies a check to each element."""

    def check(value: Any) -> bool:
        listed = elements(value)
        return listed is not None and all(map(accepts, listed))

    return check


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def is_float(value: Any) -> bool:
    return are_floats([value])


def are_floats(value: Any) -> bool:
    try:
        floats(value)
    except (TypeError, ValueError):
        return False
    return True


are_tokens = list_of(is_number)
