"""Conformance classes, one per target of the run."""

from __future__ import annotations

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.load_target import load_target
from pytest_roseinfer.suite.conformance import conformance

settings.choose_kernel_runtime()
for _name in settings.current().targets:
    _made = conformance(load_target(_name))
    # Number the classes of targets with equal names, so that none hides another.
    _same = sum(_other.startswith(_made.__name__) for _other in globals())
    globals()[f"{_made.__name__}{_same + 1 if _same else ''}"] = _made
