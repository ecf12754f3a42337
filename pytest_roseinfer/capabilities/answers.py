"""The answers of an adapter, checked for being answers at all."""

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

# What is wrong with an answer, and how a failure shows it.


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


# The answers of caches.


Pair = tuple["torch.Tensor", "torch.Tensor"]


def table(call: str, shown: Any) -> list[int | None]:
    listed = isinstance(shown, Iterable) and not isinstance(shown, str | bytes | Mapping)
    blocks = list(shown) if listed else [shown]
    if not (listed and all(block is None or is_number(block) for block in blocks)):
        refuse(call, shown, "a list of block numbers")
    return blocks


def ledger(call: str, shown: Any) -> Ledger:
    if not isinstance(shown, Ledger):
        refuse(call, shown, "a Ledger")
    refcounts = shown.refcounts
    if not (isinstance(refcounts, Mapping) and are_numbers((*refcounts, *refcounts.values()))):
        raise WrongAnswer(
            f"{call} returned a Ledger whose refcounts are {in_words(refcounts)}: "
            "map each block that is held to the number of its holders"
        )
    for name in ("free", "cached"):
        blocks = getattr(shown, name)
        if not (isinstance(blocks, Collection) and are_numbers(blocks)):
            raise WrongAnswer(
                f"{call} returned a Ledger whose {name} is {in_words(blocks)}: list block numbers"
            )
    for name in ("total", "swapped", "num_free"):
        blocks = getattr(shown, name)
        if not (is_number(blocks) or (blocks is None and name != "total")):
            raise WrongAnswer(
                f"{call} returned a Ledger whose {name} is {in_words(blocks)}: a number of blocks"
            )
    return shown


def pair(call: str, shown: Any) -> Pair:
    """Check for keys and values; both may lie in one tensor, one behind the other."""
    if not (isinstance(shown, torch.Tensor) and shown.dim() == 4 and len(shown) == 2):
        listed = isinstance(shown, tuple | list) and len(shown) == 2
        if not (listed and all(isinstance(each, torch.Tensor) for each in shown)):
            refuse(call, shown, "keys and values, two tensors")
    keys, values = shown
    return keys, values


def storage(call: str, shown: Any, dimensions: Collection[int]) -> Pair:
    """Check for two views, as ``pair`` does, of what is stored in all layers."""
    in_one = isinstance(shown, torch.Tensor) and shown.dim() and len(shown) == 2
    views = (shown[0], shown[1]) if in_one else pair(call, shown)
    if not all(view.dim() in dimensions for view in views):
        refuse(call, shown, f"views of {' or '.join(map(str, dimensions))} dimensions")
    return views


def laid_out(call: str, view: torch.Tensor, due: Mapping[str, int | None]) -> None:
    """Check the sizes of a view that has the first of some dimensions; None is for any size."""
    sizes = zip(view.shape, due.values(), strict=False)
    if any(size not in (found, None) for found, size in sizes):
        names = [name if size is None else f"{name}={size}" for name, size in due.items()]
        refuse(call, view, f"views [{', '.join(names[: view.dim()])}]")


def lies_where_it_did(call: str, view: torch.Tensor, again: torch.Tensor) -> None:
    """Check that the same is shown again, and not another copy of it."""
    if view.data_ptr() != again.data_ptr():
        raise WrongAnswer(
            f"{call} returned a copy, another one each time: return views of the tensors that the "
            "cache itself writes to, which the harness poisons where nobody reads"
        )


def count(call: str, shown: Any) -> int:
    if not is_number(shown):
        refuse(call, shown, "a number of tokens")
    return int(shown)


def counts(call: str, shown: Any) -> Mapping[str, int]:
    if not are_counts(shown):
        refuse(call, shown, COUNTS)
    return shown


def attention(call: str, shown: Any) -> torch.Tensor:
    if not isinstance(shown, torch.Tensor):
        refuse(call, shown, "a tensor like the query")
    return shown


def reservation(shown: object, error: Exception) -> WrongAnswer | None:
    """Return what to say where ``fill`` may have raised since ``reserve`` returned nothing."""
    if shown is None and isinstance(error, TypeError | AttributeError):
        raised = f"{type(error).__name__}: {error}"
        return WrongAnswer(
            f"reserve() returned None, and fill(None, key, value) raised {raised}: "
            "return from reserve what fill needs"
        )
    return None


# The answers of engines, which are declared where their methods are.


@dataclass(frozen=True, slots=True)
class Answer:
    """The value that a method of an adapter must return."""

    accepts: Callable[[Any], bool]
    words: str
    least: str
    """Name of the adapter's attribute with its least length; empty for any length."""


def returns(accepts: Callable[[Any], bool], words: str, least: str = "") -> Callable[..., Any]:
    """Declare the value that a method of an adapter must return, as a check and in words."""

    def declare(method: _Method) -> _Method:
        method.__dict__["answer"] = Answer(accepts, words, least)
        return method

    return declare


def checks_of(adapter: type[Any]) -> dict[str, Callable[..., Any]]:
    """Return the checks of an adapter class's answers, by the names of methods.

    A check calls the method: its first argument is a function that returns the method, and the
    others are passed on.
    """
    return {
        name: partial(_checked, each.answer, getattr(adapter, each.answer.least, 0), adapter, name)
        for name, each in adapter.declared.items()
        if hasattr(each, "answer")
    }


def _checked(
    answer: Answer,
    least: int,
    adapter: type[Any],
    name: str,
    method: Callable[[], Any],
    *arguments: Any,
    **named: Any,
) -> Any:
    shown = method()(*arguments, **named)
    if not answer.accepts(shown) or (least and len(shown) < least):
        refuse(call_of(adapter, name), shown, answer.words.format(least=least))
    return shown


def call_of(adapter: type[Any], name: str) -> str:
    """Return how the harness calls a method, for messages."""
    _, *parameters = signature(adapter.declared[name]).parameters
    return f"{name}({', '.join(parameters)})"


def floats(shown: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a list of numbers as an array; raise ``TypeError`` for anything else."""
    if isinstance(shown, torch.Tensor) and shown.is_floating_point():
        shown = shown.detach().cpu().double()  # NumPy cannot read tensors from everywhere
    found = np.asarray(shown)
    if found.ndim != 1 or found.dtype.kind not in "fiu":
        raise TypeError(f"no list of numbers: {shown!r}")
    return found.astype(np.float64)


def elements(shown: Any) -> list[Any] | None:
    """Return the elements of a list, a tuple or an array; None for anything else."""
    if isinstance(shown, str | bytes | Mapping | Set) or not isinstance(shown, Collection):
        return None
    try:
        return list(shown)
    except TypeError:  # an array without a dimension
        return None


def list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check of lists by a check of each element."""

    def check(shown: Any) -> bool:
        found = elements(shown)
        return found is not None and all(map(accepts, found))

    return check


def is_text(shown: Any) -> bool:
    return isinstance(shown, str)


def is_truth(shown: Any) -> bool:
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
