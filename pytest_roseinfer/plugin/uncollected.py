"""Finds classes of ``conformance()`` that pytest passes over, since their names begin otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

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


def _is_made(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ShippedTests) and hasattr(value, "adapter")


def _is_taken(made: Any, taken: Sequence[type]) -> bool:
    return any(issubclass(each, made) for each in taken)
