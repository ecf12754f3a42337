"""Repairs of defects of other projects while they run: their files stay as they are."""

from __future__ import annotations

import inspect
import textwrap
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextlib import AbstractContextManager


@dataclass(frozen=True, slots=True)
class Repair:
    module: str
    """Module of a function or class, without the package."""
    function: str
    """Name of a function, or ``Class.method``."""
    before: str
    """Text in its source, once."""
    after: str
    users: tuple[str, ...] = ()
    """Further modules that import the function by name."""


def repaired(
    part: Callable[[str], Any], repairs: Mapping[str, Repair], but: Collection[str]
) -> AbstractContextManager[Any]:
    """Return a context in which functions of a project are repaired, ``but`` for some findings.

    ``part`` imports a module.
    """
    with ExitStack() as stack:
        for finding, repair in repairs.items():
            if finding in but:
                continue
            owner, _, name = repair.function.rpartition(".")
            function = _repaired(part, repair)
            for module in (repair.module, *repair.users):
                place = getattr(part(module), owner) if owner else part(module)
                stack.enter_context(mock.patch.object(place, name, function))
        return stack.pop_all()


@cache
def _repaired(part: Callable[[str], Any], repair: Repair) -> Any:
    module = part(repair.module)
    owner, _, name = repair.function.rpartition(".")
    place = getattr(module, owner) if owner else module
    source = textwrap.dedent(inspect.getsource(getattr(place, name)))
    if source.count(repair.before) != 1:
        raise LookupError(f"{repair.function} does not have once: {repair.before}")
    scope: dict[str, Any] = {}
    source = "from __future__ import annotations\n" + source.replace(repair.before, repair.after)
    exec(source, vars(module), scope)
    return scope[name]
