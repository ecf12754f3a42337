"""A package that is missing is done without while another one is imported, and only then."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import pytest

from pytest_roseinfer.targets.others.without_its_top import without


def test_a_missing_package_is_done_without_and_is_missing_again() -> None:
    with without("no_such_package", "no_such_package.of_it"):
        taken = import_module("no_such_package.of_it").anything
    assert taken is not None
    assert not [name for name in sys.modules if name.startswith("no_such_package")]
    with pytest.raises(ModuleNotFoundError):
        import_module("no_such_package")


def test_a_package_that_is_there_is_not_done_without() -> None:
    with without("json"):
        assert import_module("json") is json
    assert sys.modules["json"] is json
