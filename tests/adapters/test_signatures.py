"""Methods that cannot be called with what the harness hands them are told before any is called."""

# ruff: noqa: ARG005
from __future__ import annotations

import re
from typing import Any

import pytest

from pytest_roseinfer import conformance
from pytest_roseinfer.adapters.validation import refuse_mistakes
from tests.capabilities.caches.list_cache import ListCache
from tests.engine_capabilities.engines.toy_engine import ToyAdapter


def _refused(name: str, method: Any, said: str, base: type[Any] = ListCache) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        refuse_mistakes(type("Mine", (base,), {name: method}))


@pytest.mark.parametrize(
    ("name", "method", "said"),
    [
        ("free", lambda self: None, "takes (), and the harness calls free(seq)"),
        (
            "fork",
            lambda self, parent, child, length: None,
            "takes (parent, child, length), and the harness calls fork(parent, child)",
        ),
        (
            "peek",
            lambda self, layer, seq: None,
            "takes (layer, seq), and the harness calls peek(seq, layer)",
        ),
        (
            "append",
            lambda self, seqs, *, key, value: None,
            "takes (seqs, key, value), and the harness calls append(seqs, key, value)",
        ),
        (
            "free",
            staticmethod(lambda: None),
            "takes (), and the harness calls free(seq)",
        ),
    ],
)
def test_other_parameters_are_refused(name: str, method: object, said: str) -> None:
    _refused(name, method, f"Mine.{name} {said}")


def test_what_is_made_of_something_is_refused() -> None:
    said = (
        "Mine.__init__ takes path, size=1, and the harness calls Mine(): build in make what needs "
        "them, or give them defaults"
    )
    _refused("__init__", lambda self, path, size=1: None, said)


def test_all_of_them_are_told_at_once() -> None:
    class Mine(ListCache):
        def free(self) -> None:  # type: ignore[override]
            """Forget all."""

        def table(self, seq: int) -> list[int]:  # type: ignore[override]
            return [seq]

    said = "Mine.table takes (seq), and the harness calls table(seq, layer); Mine.free takes ()"
    with pytest.raises(TypeError, match=f"^{re.escape(said)}"):
        refuse_mistakes(Mine)


def test_those_of_an_engine_are_its_own() -> None:
    said = "Mine.step takes (count), and the harness calls step()"
    _refused("step", lambda self, count: None, said, ToyAdapter)


@pytest.mark.parametrize(
    "method",
    [
        lambda self, sequence: None,
        lambda self, seq, now=True: None,
        lambda *given: None,
        staticmethod(lambda seq: None),
        classmethod(lambda cls, seq: None),
    ],
)
def test_what_can_be_called_is_not(method: object) -> None:
    refuse_mistakes(type("Mine", (ListCache,), {"free": method}))


def test_a_cache_in_place_of_its_class_is_hinted_at() -> None:
    class Mine(ListCache):
        pass

    with pytest.raises(TypeError, match=r"not <.*>: write conformance\(Mine\), since each histor"):
        conformance(Mine())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"takes a subclass of KVCacheAdapter, not <class 'int'>$"):
        conformance(int)  # type: ignore[arg-type]
