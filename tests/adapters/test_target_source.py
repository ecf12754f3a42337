"""Whether a target is there is read in its module's source, without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.adapters.load_target import TargetError, find_module, require_target

if TYPE_CHECKING:
    from pathlib import Path

FAILS = "raise AssertionError('it was imported')\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def refused(name: str) -> str:
    with pytest.raises(TargetError) as caught:
        require_target(name)
    return str(caught.value)


BINDS = {
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
"""Sources that have a Cache, or of which only an import would tell."""


@pytest.mark.parametrize("source", BINDS.values(), ids=BINDS)
def test_a_class_that_may_be_there(source: str, folder: Path) -> None:
    (folder / "fast_caches.py").write_text(f"{FAILS}{source}\n")
    require_target("fast_caches:Cache")
    require_target("fast_caches:Cache.Inner")


def test_one_that_cannot_be_there_is_refused_with_what_is(folder: Path) -> None:
    (folder / "fast_caches.py").write_text(f"{FAILS}class ListCache: pass\nnothing = 1\n")
    said = refused("fast_caches:ListCahce")
    assert said.endswith("fast_caches has no ListCahce; did you mean ListCache?")
    assert refused("fast_caches:Engine").endswith("fast_caches has no Engine")


def test_no_package_around_it_is_imported(folder: Path) -> None:
    (folder / "heavy" / "inner").mkdir(parents=True)
    for each in ("heavy/__init__.py", "heavy/inner/__init__.py", "heavy/inner/caches.py"):
        (folder / each).write_text(FAILS)
    assert find_module("heavy.inner.caches")
    assert refused("heavy.inner.cashes:Cache").endswith("did you mean heavy.inner.caches?")
    assert refused("heavy.inner.caches.more:Cache").endswith("no module heavy.inner.caches.more")


def test_folders_without_an_init(folder: Path) -> None:
    (folder / "plain" / "inner").mkdir(parents=True)
    (folder / "plain" / "inner" / "caches.py").write_text("class Cache: pass")
    require_target("plain.inner.caches:Cache")
    assert "there is no module plain.inner.cashes" in refused("plain.inner.cashes:Cache")


def test_a_package_that_puts_its_modules_elsewhere_is_imported(folder: Path) -> None:
    (folder / "moved" / "src").mkdir(parents=True)
    (folder / "moved" / "__init__.py").write_text("__path__.append(__path__[0] + '/src')\n")
    (folder / "moved" / "src" / "caches.py").write_text("class Cache: pass")
    require_target("moved.caches:Cache")
    assert "has no Kache" in refused("moved.caches:Kache")
