"""Partial imports: a part of a package is imported without the requirements of other parts."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.targets.partial_import import import_part, stub_package

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "a_package_that_needs_a_gpu"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise RuntimeError('no GPU')")
    (tmp_path / name / "books.py").write_text("from absent_kernels import kernel\nBLOCKS = 3")
    monkeypatch.syspath_prepend(tmp_path)
    for module in (name, f"{name}.books", "absent_kernels"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return name


def test_part_is_imported_without_its_package_and_unused_imports(package: str) -> None:
    with stub_package("absent_kernels"):
        books = import_part(package, "books", "")
    assert books.BLOCKS == 3
    assert "absent_kernels" not in sys.modules


def test_missing_import_of_a_part_is_an_error(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="absent_kernels"):
        import_part(package, "books", "")


def test_stub_of_a_missing_package_is_removed() -> None:
    with stub_package("no_such_package", "no_such_package.of_it"):
        attribute = import_module("no_such_package.of_it").anything
    assert attribute is not None
    assert not [name for name in sys.modules if name.startswith("no_such_package")]
    with pytest.raises(ModuleNotFoundError):
        import_module("no_such_package")


def test_installed_package_is_not_stubbed() -> None:
    with stub_package("json"):
        assert import_module("json") is json
    assert sys.modules["json"] is json
