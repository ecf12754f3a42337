"""Has the calls of an adapter's methods go through something that watches them."""

from __future__ import annotations

import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer.adapters.base import Adapter


def send_through(watching: Callable[..., Any], adapter: Adapter, name: str) -> None:
    """Have ``watching`` called from here on, with the method of this name before its arguments."""
    method = getattr(adapter, name)
    # A cache that held itself would keep its tensors until the next garbage collection.
    found: Any = weakref.WeakMethod(method) if isinstance(method, MethodType) else lambda: method

    def sent_through(*arguments: Any, **named: Any) -> Any:
        return watching(found(), *arguments, **named)

    vars(adapter)[name] = sent_through
