"""Finds what was meant to be tested and is not: classes under other names, and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.suite.shipped_tests import ShippedTests

if TYPE_CHECKING:
    from collections.abc import Sequence


def warn_of_uncollected(
    module: pytest.Module, collected: Sequence[pytest.Item | pytest.Collector]
) -> None:
    """Warn of each class in a module that was not collected, and none that derives from it."""
    taken = [each.obj for each in collected if isinstance(each, pytest.Class)]
    for name, value in vars(module.obj).items():
        if not name.startswith("_") and _is_made(value) and not _is_taken(value, taken):
            module.warn(
                pytest.PytestCollectionWarning(
                    f"{name} is a class of conformance() that is not run: pytest collects classes "
                    f"whose names begin with {' or '.join(module.config.getini('python_classes'))}"
                )
            )


def warn_of_unused(
    module: pytest.Module, collected: Sequence[pytest.Item | pytest.Collector]
) -> None:
    """Warn of each adapter in a module that has no tests, and no class for them."""
    values = vars(module.obj).values()
    if not all(map(_is_adapter, collected)) or any(map(_is_made, values)):
        return
    for value in values:
        own = isinstance(value, type) and value.__module__ == module.obj.__name__
        if own and issubclass(value, Adapter) and not value.__name__.startswith("_"):
            name = value.__name__.removeprefix("Test")
            rename = f"name it {name}, and " if name != value.__name__ else ""
            module.warn(
                pytest.PytestCollectionWarning(
                    f"{value.__name__} is an adapter that nothing here tests: {rename}write "
                    f"Test{name} = conformance({name})"
                )
            )


def _is_adapter(collected: pytest.Item | pytest.Collector) -> bool:
    """Tell if pytest took an adapter for a class of tests, for its name."""
    return isinstance(collected, pytest.Class) and issubclass(collected.obj, Adapter)


def _is_made(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ShippedTests) and hasattr(value, "adapter")


def _is_taken(made: Any, taken: Sequence[type]) -> bool:
    return any(issubclass(each, made) for each in taken)
