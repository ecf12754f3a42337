"""A part of a package is imported without what the package itself, or another part, would need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.targets.without_its_top import part_of

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


def test_what_is_not_called_need_not_be_there(package: str) -> None:
    books = part_of(package, "books", "", not_called=("absent_kernels",))
    assert books.BLOCKS == 3
    assert "absent_kernels" not in sys.modules


def test_what_is_called_must_be(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="absent_kernels"):
        part_of(package, "books", "")
