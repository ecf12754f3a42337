"""Mistakes in an adapter class that show before anything is built."""

from __future__ import annotations

from pytest_roseinfer.adapter import KVCacheAdapter
from pytest_roseinfer.model import FORK_SHARES


def refuse_mistakes(adapter: type[KVCacheAdapter]) -> None:
    """Raise ``TypeError`` for a class that is no usable adapter; the message says why."""
    if not (isinstance(adapter, type) and issubclass(adapter, KVCacheAdapter)):
        raise TypeError(f"conformance() takes a subclass of KVCacheAdapter, not {adapter!r}")
    missing = [
        name
        for name in ("make", "append", "peek")
        if getattr(adapter, name) is getattr(KVCacheAdapter, name)
    ]
    if missing:
        raise TypeError(f"{adapter.__name__} must define {', '.join(missing)}")
    if adapter.fork_shares not in FORK_SHARES:
        raise TypeError(
            f"{adapter.__name__}.fork_shares is {adapter.fork_shares!r}: choose one of "
            + ", ".join(map(repr, FORK_SHARES))
        )
