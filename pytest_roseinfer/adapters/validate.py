"""Mistakes in an adapter class that show before anything is built."""

from __future__ import annotations

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.fast_path import FastPath
from pytest_roseinfer.adapters.shapes import refuse_shapes
from pytest_roseinfer.adapters.used_again import refuse_what_is_not_shown
from pytest_roseinfer.oracle import FORK_SHARES


def refuse_mistakes(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` for a class that is no usable adapter; the message says why."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise TypeError(f"conformance() takes a subclass of KVCacheAdapter, not {adapter!r}")
    name = adapter.__name__
    if missing := [method for method in adapter.required if not adapter.defines(method)]:
        raise TypeError(f"{name} must define {', '.join(missing)}")
    if issubclass(adapter, KVCacheAdapter):
        refuse_shapes(adapter)
        refuse_what_is_not_shown(adapter)
        if not isinstance(adapter.atomic_batches, bool):
            raise TypeError(
                f"{name}.atomic_batches is {adapter.atomic_batches!r}: write False if an append "
                "that finds no room stores the rows ahead of the one that found none, else True"
            )
    shares = getattr(adapter, "fork_shares", FORK_SHARES[0])
    if shares not in FORK_SHARES:
        known = ", ".join(map(repr, FORK_SHARES))
        raise TypeError(f"{name}.fork_shares is {shares!r}: choose one of {known}")
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
