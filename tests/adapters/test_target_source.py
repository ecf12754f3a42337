"""Target names are checked by reading a module's source, without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.adapters.load_target import TargetError, find_module, require_target

if TYPE_CHECKING:
    from pathlib import Path

FAIL_ON_IMPORT = "raise AssertionError('it was imported')\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def error_of(name: str) -> str:
    with pytest.raises(TargetError) as caught:
        require_target(name)
    return str(caught.value)


DEFINITIONS = {
    "class": "class Cache: pass",
    "function": "def Cache(): pass",
    "assignment": "Cache = make()",
    "import": "from elsewhere import Cache",
    "import by another name": "from elsewhere import Other as Cache",
    "on some branch": "if x:\n    class Cache: pass\n",
    "of a global statement": "def f():\n    global Cache\n    Cache = 1\n",
    "star import": "from elsewhere import *",
    "on demand": "def __getattr__(name): ...",
    "by globals": "globals()['Cache'] = 1",
    "in sys.modules": "sys.modules[__name__].Other = 1",
    "no Python": "class (",
}
"""Sources that define a Cache, or that only an import could judge."""


@pytest.mark.parametrize("source", DEFINITIONS.values(), ids=DEFINITIONS)
def test_class_that_may_exist_is_accepted(source: str, folder: Path) -> None:
    (folder / "fast_caches.py").write_text(f"{FAIL_ON_IMPORT}{source}\n")
    require_target("fast_caches:Cache")
    require_target("fast_caches:Cache.Inner")


def test_missing_class_is_refused_with_a_suggestion(folder: Path) -> None:
    (folder / "fast_caches.py").write_text(f"{FAIL_ON_IMPORT}class ListCache: pass\nnothing = 1\n")
    message = error_of("fast_caches:ListCahce")
    assert message.endswith("fast_caches has no ListCahce; did you mean ListCache?")
    assert error_of("fast_caches:Engine").endswith("fast_caches has no Engine")


def test_parent_packages_are_not_imported(folder: Path) -> None:
    (folder / "heavy" / "inner").mkdir(parents=True)
    for each in ("heavy/__init__.py", "heavy/inner/__init__.py", "heavy/inner/caches.py"):
        (folder / each).write_text(FAIL_ON_IMPORT)
    assert find_module("heavy.inner.caches")
    assert error_of("heavy.inner.cashes:Cache").endswith("did you mean heavy.inner.caches?")
    assert error_of("heavy.inner.caches.more:Cache").endswith("no module heavy.inner.caches.more")


def test_namespace_packages_are_found(folder: Path) -> None:
    (folder / "plain" / "inner").mkdir(parents=True)
    (folder / "plain" / "inner" / "caches.py").write_text("class Cache: pass")
    require_target("plain.inner.caches:Cache")
    assert "there is no module plain.inner.cashes" in error_of("plain.inner.cashes:Cache")


def test_package_that_changes_its_path_is_imported(folder: Path) -> None:
    (folder / "moved" / "src").mkdir(parents=True)
    (folder / "moved" / "__init__.py").write_text("__path__.append(__path__[0] + '/src')\n")
    (folder / "moved" / "src" / "caches.py").write_text("class Cache: pass")
    require_target("moved.caches:Cache")
    assert "has no Kache" in error_of("moved.caches:Kache")
