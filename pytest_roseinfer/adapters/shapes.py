"""The shapes that an adapter says its cache can be built with, and what is no such saying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pytest_roseinfer.adapters.tolerance import MOST, OVER, Tolerance

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.adapters.cache import KVCacheAdapter


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _is_dtype(value: object) -> bool:
    found = getattr(torch, value, None) if isinstance(value, str) else None
    return isinstance(found, torch.dtype) and found.is_floating_point


_RIGHT: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "dtypes": (_is_dtype, 'names of torch dtypes, as in ("float32", "bfloat16")'),
    "head_counts": (_is_size, "numbers from 1 on, as in (1, 8)"),
    "head_dims": (_is_size, "numbers from 1 on, as in (64, 128)"),
    "block_sizes": (_is_size, "numbers from 1 on, as in (16, 32)"),
}
"""For each attribute, what holds for all that it lists, and what to write."""
_FEWEST = {"most_sequences": 6, "most_tokens": 16}
"""What the drawn histories need: so many sequences at a time, and a few blocks of tokens."""


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


def _codes(said: object) -> str:
    """Say what is missing where one of the dtypes is one of codes."""
    named = [each for each in said if isinstance(each, str)] if isinstance(said, Sequence) else []
    codes = [each for each in named if isinstance(getattr(torch, each, None), torch.dtype)]
    missing = [each for each in codes if not _is_dtype(each)]
    return f"; {missing[0]} needs tolerance[{missing[0]!r}] as well" if missing else ""


def refuse_bound(adapter: type[Adapter], name: str, least: int) -> None:
    """Raise ``TypeError`` where a bound is no number, or fewer than what is drawn."""
    said = getattr(adapter, name)
    if said is not None and not (_is_size(said) and said >= least):
        raise TypeError(
            f"{adapter.__name__}.{name} is {said!r}: write a number from {least} on, or None "
            "for no bound"
        )


def refuse_tolerance(adapter: type[KVCacheAdapter]) -> None:
    """Raise ``TypeError`` for a tolerance that makes no sense."""
    for name, said in adapter.tolerance.items():
        if not isinstance(said, Tolerance):
            raise TypeError(
                f"{adapter.__name__}.tolerance[{name!r}] is {said!r}: write Tolerance(1 / 250)"
            )
        if not (0 < said.of_greatest < MOST and said.over in OVER and _is_dtype(said.tensors)):
            raise TypeError(
                f"{adapter.__name__}.tolerance[{name!r}] is {said}: of_greatest lies between 0 and "
                f"{MOST}, over is {' or '.join(map(repr, OVER))}, and tensors is the name of a "
                "torch dtype"
            )
