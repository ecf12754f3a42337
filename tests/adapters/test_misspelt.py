"""Misspelt names of an adapter, and methods that need others."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pytest_roseinfer import KVCacheAdapter
from pytest_roseinfer.adapters.validation import refuse_mistakes
from tests.capabilities.caches.list_cache import ListCache
from tests.engine_capabilities.engines.toy_engine import ToyAdapter


def method(self: Any, *arguments: Any) -> None:
    """Do nothing."""


def _assert_refused(name: str, value: object, suggestion: str, base: type[Any] = ListCache) -> None:
    message = (
        f"Paged has {name}, which the harness does not use: did you mean {suggestion}? "
        "Begin the name with an underscore if it is your own"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        refuse_mistakes(type("Paged", (base,), {name: value}))


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("trunctate", "truncate"),
        ("Truncate", "truncate"),
        ("lookup", "look_up"),
        ("legder", "ledger"),
        ("finishSwapOut", "finish_swap_out"),
        ("trucate_many", "truncate_many"),
        ("use_queues", "use_queue"),
    ],
)
def test_misspelt_method_is_refused(name: str, suggestion: str) -> None:
    _assert_refused(name, method, suggestion)
    _assert_refused(name, staticmethod(method), suggestion)


@pytest.mark.parametrize(
    ("name", "value", "suggestion"),
    [
        ("fork_share", "nothing", "fork_shares"),
        ("block_size", (16,), "block_sizes"),
        ("full_error", (MemoryError,), "full_errors"),
        ("condition", ("last_position",), "conditions"),
    ],
)
def test_misspelt_attribute_is_refused(name: str, value: object, suggestion: str) -> None:
    _assert_refused(name, value, suggestion)


def test_misspelt_method_of_an_engine_is_refused() -> None:
    _assert_refused("prompt_logprob", method, "prompt_logprobs", ToyAdapter)
    refuse_mistakes(type("Mine", (ToyAdapter,), {"trunctate": method}))


def test_misspelt_required_method_is_not_reported_as_missing() -> None:
    _assert_refused("apend", method, "append", KVCacheAdapter)


@pytest.mark.parametrize(
    "name",
    [
        "blocks",
        "clear",
        "appended",
        "truncated",
        "rows",
        "_trunctate",
        "store",
        "sequences",
        "pool",
    ],
)
def test_helper_with_another_name_passes(name: str) -> None:
    refuse_mistakes(type("Mine", (ListCache,), {name: method}))


def test_attribute_spelled_like_a_method_passes() -> None:
    attributes = {"scale": 0.125, "Table": type("Table", (), {}), "block_size": property(method)}
    refuse_mistakes(type("Mine", (ListCache,), attributes))
    refuse_mistakes(type("Mine", (ListCache,), {"block_sizes": (16,), "block_size": 16}))


def test_helper_spelled_like_a_defined_method_passes() -> None:
    refuse_mistakes(type("Mine", (ListCache,), {"truncate": method, "truncates": method}))


def test_names_of_another_base_class_pass() -> None:
    base = type("Library", (), {"trunctate": method})
    refuse_mistakes(type("Mine", (base, ListCache), {}))


def test_misspelt_name_of_a_base_adapter_is_refused() -> None:
    base = type("Base", (ListCache,), {"trunctate": method})
    with pytest.raises(TypeError, match="did you mean truncate"):
        refuse_mistakes(type("Mine", (base,), {}))


@pytest.mark.parametrize(
    ("method_name", "missing"),
    [
        ("reserve", "fill"),
        ("fill", "reserve"),
        ("preempt", "resume"),
        ("resume", "preempt"),
        ("look_up", "begin_with, use_tokens"),
        ("match_prefix", "use_tokens"),
        ("arena", "table"),
        ("ledger", "table"),
        ("swap_out", "finish_swap_out, swap_in, finish_swap_in"),
        ("finish_swap_in", "swap_out, finish_swap_out, swap_in"),
    ],
)
def test_method_without_the_methods_it_needs_is_refused(method_name: str, missing: str) -> None:
    with pytest.raises(TypeError, match=f"^Paged defines {method_name} and must .* {missing} too$"):
        refuse_mistakes(type("Paged", (ListCache,), {method_name: method}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "match_leaves",
            1,
            r"match_leaves was renamed: write prefixes = PrefixTraits\(recomputed_tokens=",
        ),
        ("texts", method, r"texts was renamed: write use_tokens\(token_ids\)"),
        ("swapped_out", method, r"swapped_out was renamed: write finish_swap_out\(swap\)"),
        ("window_groups", 2, r"renamed: write windows = WindowTraits\(groups=...\)"),
        ("prefixes", "equal prefixes", r"Own.prefixes is 'equal prefixes': write PrefixTraits\("),
    ],
)
def test_renamed_method_of_a_cache_is_refused_with_its_new_name(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        refuse_mistakes(type("Own", (ListCache,), {name: value}))


def test_renamed_method_of_an_engine_is_refused_with_its_new_name() -> None:
    with pytest.raises(TypeError, match=r"^Own.leftovers was renamed: write find_leaks\(\)$"):
        refuse_mistakes(type("Own", (ToyAdapter,), {"leftovers": method}))
