"""Signatures: methods that the harness cannot call are refused before any is called."""

# ruff: noqa: ARG005
from __future__ import annotations

import re
from typing import Any

import pytest

from pytest_roseinfer import conformance
from pytest_roseinfer.adapters.validation import refuse_mistakes
from tests.capabilities.caches.list_cache import ListCache
from tests.engine_capabilities.engines.toy_engine import ToyAdapter


def _assert_refused(name: str, method: Any, message: str, base: type[Any] = ListCache) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        refuse_mistakes(type("Mine", (base,), {name: method}))


@pytest.mark.parametrize(
    ("name", "method", "message"),
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
def test_wrong_parameters_are_refused(name: str, method: object, message: str) -> None:
    _assert_refused(name, method, f"Mine.{name} {message}")


def test_constructor_with_arguments_is_refused() -> None:
    message = (
        "Mine.__init__ takes path, size=1, and the harness calls Mine(): build in make what needs "
        "them, or give them defaults"
    )
    _assert_refused("__init__", lambda self, path, size=1: None, message)


def test_all_wrong_signatures_are_reported_together() -> None:
    class Mine(ListCache):
        def free(self) -> None:  # type: ignore[override]
            """Free all sequences."""

        def table(self, seq: int) -> list[int]:  # type: ignore[override]
            return [seq]

    message = "Mine.table takes (seq), and the harness calls table(seq, layer); Mine.free takes ()"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        refuse_mistakes(Mine)


def test_wrong_signature_of_an_engine_is_refused() -> None:
    message = "Mine.step takes (count), and the harness calls step()"
    _assert_refused("step", lambda self, count: None, message, ToyAdapter)


@pytest.mark.parametrize(
    "method",
    [
        lambda self, sequence: None,
        lambda self, seq, now=True: None,
        lambda *arguments: None,
        staticmethod(lambda seq: None),
        classmethod(lambda cls, seq: None),
    ],
)
def test_callable_signatures_pass(method: object) -> None:
    refuse_mistakes(type("Mine", (ListCache,), {"free": method}))


def test_instance_in_place_of_a_class_is_refused_with_a_hint() -> None:
    class Mine(ListCache):
        pass

    with pytest.raises(TypeError, match=r"not <.*>: write conformance\(Mine\), since each histor"):
        conformance(Mine())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"takes a subclass of KVCacheAdapter, not <class 'int'>$"):
        conformance(int)  # type: ignore[arg-type]
