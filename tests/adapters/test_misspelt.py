"""Names in an adapter that nothing asks for, and methods that are nothing without another."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pytest_roseinfer import KVCacheAdapter
from pytest_roseinfer.adapters.validation import refuse_mistakes
from tests.capabilities.caches.list_cache import ListCache
from tests.engine_capabilities.engines.toy_engine import ToyAdapter


def method(self: Any, *given: Any) -> None:
    """Do nothing."""


def _refused(name: str, value: object, meant: str, base: type[Any] = ListCache) -> None:
    said = (
        f"Paged has {name}, which the harness does not use: did you mean {meant}? "
        "Begin the name with an underscore if it is your own"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        refuse_mistakes(type("Paged", (base,), {name: value}))


@pytest.mark.parametrize(
    ("name", "meant"),
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
def test_a_misspelt_method_is_refused(name: str, meant: str) -> None:
    _refused(name, method, meant)
    _refused(name, staticmethod(method), meant)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("fork_share", "nothing", "fork_shares"),
        ("block_size", (16,), "block_sizes"),
        ("full_error", (MemoryError,), "full_errors"),
        ("condition", ("last_position",), "conditions"),
    ],
)
def test_a_misspelt_attribute_is_refused(name: str, value: object, meant: str) -> None:
    _refused(name, value, meant)


def test_the_names_of_an_engine_are_its_own() -> None:
    _refused("prompt_logprob", method, "prompt_logprobs", ToyAdapter)
    refuse_mistakes(type("Mine", (ToyAdapter,), {"trunctate": method}))


def test_a_required_method_is_said_to_be_misspelt_and_not_to_be_missing() -> None:
    _refused("apend", method, "append", KVCacheAdapter)


@pytest.mark.parametrize(
    "name",
    [
        "blocks",
        "reset",
        "appended",
        "truncated",
        "rows",
        "_trunctate",
        "store",
        "sequences",
        "pool",
    ],
)
def test_an_honest_helper_passes(name: str) -> None:
    refuse_mistakes(type("Mine", (ListCache,), {name: method}))


def test_what_is_no_method_is_not_taken_for_one() -> None:
    own = {"scale": 0.125, "Table": type("Table", (), {}), "block_size": property(method)}
    refuse_mistakes(type("Mine", (ListCache,), own))
    refuse_mistakes(type("Mine", (ListCache,), {"block_sizes": (16,), "block_size": 16}))


def test_a_helper_beside_the_method_it_is_spelled_like_passes() -> None:
    refuse_mistakes(type("Mine", (ListCache,), {"truncate": method, "truncates": method}))


def test_names_of_a_base_that_is_no_adapter_pass() -> None:
    base = type("Library", (), {"trunctate": method})
    refuse_mistakes(type("Mine", (base, ListCache), {}))


def test_a_misspelt_name_is_found_in_a_base_of_the_users() -> None:
    base = type("Base", (ListCache,), {"trunctate": method})
    with pytest.raises(TypeError, match="did you mean truncate"):
        refuse_mistakes(type("Mine", (base,), {}))


@pytest.mark.parametrize(
    ("defined", "lacking"),
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
def test_a_method_that_is_nothing_without_another_is_refused(defined: str, lacking: str) -> None:
    with pytest.raises(TypeError, match=f"^Paged defines {defined} and must .* {lacking} too$"):
        refuse_mistakes(type("Paged", (ListCache,), {defined: method}))


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
def test_names_of_before_are_refused_with_what_to_write(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        refuse_mistakes(type("Own", (ListCache,), {name: value}))


def test_an_engines_names_of_before_are_refused_too() -> None:
    with pytest.raises(TypeError, match=r"^Own.leftovers was renamed: write find_leaks\(\)$"):
        refuse_mistakes(type("Own", (ToyAdapter,), {"leftovers": method}))
