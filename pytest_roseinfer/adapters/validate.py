"""Mistakes in an adapter class that show before anything is built."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.adapters.fast_path import FastPath
from pytest_roseinfer.oracle import FORK_SHARES

if TYPE_CHECKING:
    from collections.abc import Iterator


def refuse_mistakes(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` for a class that is no usable adapter; the message says why."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise TypeError(f"conformance() takes a subclass of KVCacheAdapter, not {adapter!r}")
    if missing := adapter.missing():
        raise TypeError(f"{adapter.__name__} must define {', '.join(missing)}")
    for mistake in chain(_wrong_shares(adapter), _wrong_paths(adapter)):
        raise TypeError(f"{adapter.__name__}{mistake}")


def _wrong_shares(adapter: type[Adapter]) -> Iterator[str]:
    shares = getattr(adapter, "fork_shares", FORK_SHARES[0])
    if shares not in FORK_SHARES:
        known = ", ".join(map(repr, FORK_SHARES))
        yield f".fork_shares is {shares!r}: choose one of {known}"


def _wrong_paths(adapter: type[Adapter]) -> Iterator[str]:
    for name, path in adapter.paths.items():
        if not isinstance(path, FastPath):
            twin = repr(path) if isinstance(path, str) else "..."
            yield f".paths[{name!r}] is {path!r}: write FastPath(equals={twin})"
        unknown = {
            switch
            for settings in (*path.runs_with, *path.never_with)
            for switch in settings
            if switch not in adapter.option_choices
        }
        if unknown:
            yield (
                f".paths[{name!r}] names {', '.join(sorted(unknown))}, which option_choices has no "
                "values for"
            )
