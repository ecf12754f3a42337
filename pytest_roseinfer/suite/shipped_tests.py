"""Tests that come with the plugin and that nobody can weaken without saying so."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer import settings
from pytest_roseinfer.settings import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pytest


class ShippedTests:
    """Test classes for one adapter. A test can be marked xfail with a reason, not replaced."""

    adapter: ClassVar[type[Any]]
    """A subclass of ``KVCacheAdapter`` or ``EngineAdapter``."""
    most_parts: ClassVar[Mapping[str, int]] = {}
    """The tests that can be cut up, and into how many parts."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        last = cls.__mro__.index(ShippedTests)
        made = max(0, last - 2)  # the class that ``conformance()`` made; the tests come after it
        _refuse_replaced_parts(cls.__mro__[:made], cls.__mro__[made : last + 1])
        for name, shipped in cls.shipped().items():
            own = getattr(cls, name)
            if inspect.unwrap(own) is not shipped:
                setattr(cls, name, _excused(shipped, own))

    @classmethod
    def shipped(cls) -> dict[str, Callable[[Any], None]]:
        """The tests of the class right under ``ShippedTests``, in their order."""
        own = cls.__mro__[cls.__mro__.index(ShippedTests) - 1]
        return {name: test for name, test in vars(own).items() if name.startswith("test_")}

    @classmethod
    def parts(cls, test: str) -> list[Part]:
        """Cut up a test's searches, which are for paths, so that processes share them."""
        device = settings.current().device
        paths = sum(path.runs_on(device) for path in cls.adapter.paths.values())
        number = max(1, min(paths, cls.most_parts.get(test, 1)))
        return [Part(each, number) for each in range(1, number + 1)]


def _refuse_replaced_parts(derived: tuple[type, ...], shipped: tuple[type, ...]) -> None:
    """Raise if a derived class replaces what the tests are made of; it may only add marks."""
    # Names of Python's and pytest's do not count, and for tests there is another rule.
    others = ("__", "test_", "pytestmark")
    parts = {name for each in shipped for name in vars(each) if not name.startswith(others)}
    for each in derived:
        if replaced := sorted(parts & vars(each).keys()):
            raise TypeError(
                f"{each.__name__} replaces {', '.join(replaced)}, of which the tests of "
                "pytest_roseinfer are made: another adapter is another conformance(...)"
            )


def excuses(mark: pytest.Mark) -> bool:
    """Return True if a mark says why a test fails, and lets it run all the same."""
    return mark.name == "xfail" and bool(mark.kwargs.get("reason")) and mark.kwargs.get("run", True)


def _excused(shipped: Callable[[Any], None], own: object) -> Callable[[Any], None]:
    """Return the shipped test with the xfail marks of the one in its place, and nothing else."""
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
