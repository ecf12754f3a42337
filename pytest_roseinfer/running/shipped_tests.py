"""Tests that come with the plugin and that nobody can weaken without saying so."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class ShippedTests:
    """Test classes for one adapter. A test can be marked xfail with a reason, not replaced."""

    adapter: ClassVar[type[Any]]
    """A subclass of ``KVCacheAdapter`` or ``EngineAdapter``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_replaced_parts(cls)
        for name in cls.shipped():
            shipped = _shipped_by(cls)[name]
            own = getattr(cls, name)
            if inspect.unwrap(own) is not shipped:
                setattr(cls, name, _excused(shipped, own))

    @classmethod
    def shipped(cls) -> list[str]:
        """The names of the tests, in their order."""
        return list(_shipped_by(cls))


def _refuse_replaced_parts(tests: type[ShippedTests]) -> None:
    """What the tests are made of is theirs; a class derived from them adds marks, and no more."""
    made, *shipped = _made_and_shipped(tests)
    parts = {name for each in (made, *shipped) for name in vars(each) if not _free(name)}
    for each in tests.__mro__[: tests.__mro__.index(made)]:
        if replaced := sorted(parts & vars(each).keys()):
            raise TypeError(
                f"{each.__name__} replaces {', '.join(replaced)}, of which the tests of "
                "pytest_roseinfer are made: another adapter is another conformance(...)"
            )


def _free(name: str) -> bool:
    """Names of Python's and pytest's, and tests, for which there is another rule."""
    return name.startswith(("__", "test_")) or name == "pytestmark"


def _made_and_shipped(tests: type[ShippedTests]) -> tuple[type, ...]:
    """What ``conformance()`` made for an adapter, the tests it was made of, and this class."""
    last = tests.__mro__.index(ShippedTests)
    return tests.__mro__[max(0, last - 2) : last + 1]


def _shipped_by(tests: type[ShippedTests]) -> dict[str, Callable[[Any], None]]:
    """The tests of the class right under ``ShippedTests``, whatever was derived from it."""
    own = tests.__mro__[tests.__mro__.index(ShippedTests) - 1]
    return {name: test for name, test in vars(own).items() if name.startswith("test_")}


def excuses(mark: pytest.Mark) -> bool:
    """True if a mark says why a test fails, and lets it run all the same."""
    return mark.name == "xfail" and bool(mark.kwargs.get("reason")) and mark.kwargs.get("run", True)


def _excused(shipped: Callable[[Any], None], own: object) -> Callable[[Any], None]:
    """The shipped test with the xfail marks of what stands in its place, and nothing else."""
    marks = [mark for mark in getattr(own, "pytestmark", []) if mark.name == "xfail"]
    if not any(map(excuses, marks)):
        raise TypeError(
            f"{shipped.__name__} is a test of pytest_roseinfer and cannot be replaced. If the "
            "target is known to fail it, mark it: @pytest.mark.xfail(reason=...)"
        )

    @wraps(shipped)
    def run(self: ShippedTests) -> None:
        shipped(self)

    vars(run)["pytestmark"] = marks
    return run
