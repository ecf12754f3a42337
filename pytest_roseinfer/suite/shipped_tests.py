"""Base class of shipped tests, which users cannot weaken silently."""

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
    """Base class of tests for an adapter; tests can be marked xfail with a reason, not replaced."""

    adapter: ClassVar[type[Any]]
    """A subclass of ``KVCacheAdapter`` or ``EngineAdapter``."""
    max_parts: ClassVar[Mapping[str, int]] = {}
    """Maximum number of parts, by the name of each test that can be split."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        last = cls.__mro__.index(ShippedTests)
        derived = max(
            0, last - 2
        )  # the class that ``conformance()`` makes; shipped classes come after it
        _refuse_replaced_parts(cls.__mro__[:derived], cls.__mro__[derived : last + 1])
        for name, shipped in cls.shipped().items():
            own_test = getattr(cls, name)
            if inspect.unwrap(own_test) is not shipped:
                setattr(cls, name, _keep_xfail(shipped, own_test))

    @classmethod
    def shipped(cls) -> dict[str, Callable[[Any], None]]:
        """Return the tests of the direct subclass of ``ShippedTests``, in their order."""
        own_class = cls.__mro__[cls.__mro__.index(ShippedTests) - 1]
        return {name: test for name, test in vars(own_class).items() if name.startswith("test_")}

    @classmethod
    def parts(cls, test: str, max_parts: int | None = None) -> list[Part]:
        """Split a test's searches, which aim at paths, into parts for several processes."""
        device = settings.current().device
        paths = sum(path.runs_on(device) for path in cls.adapter.paths.values())
        number = max(1, min(paths, cls.max_parts.get(test, 1), max_parts or paths))
        return [Part(each, number) for each in range(1, number + 1)]


def _refuse_replaced_parts(derived: tuple[type, ...], shipped: tuple[type, ...]) -> None:
    """Raise if a derived class replaces attributes of shipped classes; it may only add marks."""
    # Names of Python and pytest do not count, and tests have a rule of their own.
    others = ("__", "test_", "pytestmark")
    parts = {name for each in shipped for name in vars(each) if not name.startswith(others)}
    for each in derived:
        if replaced := sorted(parts & vars(each).keys()):
            raise TypeError(
                f"{each.__name__} replaces {', '.join(replaced)}, which the tests of "
                "pytest_roseinfer need; for another adapter, call conformance(...) again"
            )


def allows_failure(mark: pytest.Mark) -> bool:
    """Return True for an xfail mark with a reason that still lets the test run."""
    return mark.name == "xfail" and bool(mark.kwargs.get("reason")) and mark.kwargs.get("run", True)


def _keep_xfail(shipped: Callable[[Any], None], own_test: object) -> Callable[[Any], None]:
    """Return the shipped test with only the xfail marks of the test that replaces it."""
    marks = [mark for mark in getattr(own_test, "pytestmark", []) if mark.name == "xfail"]
    if not any(map(allows_failure, marks)):
        raise TypeError(
            f"{shipped.__name__} is a test of pytest_roseinfer and cannot be replaced; if the "
            "target is known to fail it, use @pytest.mark.xfail(reason=...)"
        )

    @wraps(shipped)
    def run(self: ShippedTests) -> None:
        shipped(self)

    vars(run)["pytestmark"] = marks
    return run
