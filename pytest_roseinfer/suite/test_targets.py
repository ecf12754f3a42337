"""One conformance class for every target of the run."""

from __future__ import annotations

from pytest_roseinfer.conformance import conformance
from pytest_roseinfer.settings import current, load_target

for _name in current().targets:
    _made = conformance(load_target(_name))
    globals()[_made.__name__] = _made
