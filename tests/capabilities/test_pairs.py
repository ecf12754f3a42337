"""Each pair of shipped capabilities that one adapter can offer is drawn together."""

from __future__ import annotations

from itertools import combinations, product
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from pytest_roseinfer import (
    AuxiliaryVector,
    FastPath,
    KeyPart,
    KVCacheAdapter,
    PrefixTraits,
    TextKey,
    Tolerance,
    WindowTraits,
)
from pytest_roseinfer.adapters.validation import refuse_mistakes
from pytest_roseinfer.histories.strategies import histories

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_roseinfer import History

EXAMPLES = 100
"""Histories among which a pair must be drawn."""


def methods(*names: str) -> dict[str, Any]:
    """Define methods, which drawing a history does not call."""

    def never_called(*_: Any) -> Any:
        raise AssertionError("a history was run")

    return dict.fromkeys(names, never_called)


BOOKS = methods("table", "ledger")
EQUAL = PrefixTraits(shares="equal prefixes")
SOME_TEXTS = {**BOOKS, **methods("use_tokens", "match_prefix"), "prefixes": EQUAL.but(finds="some")}
SALT = (KeyPart("salt"),)
WINDOWS = {"windows": WindowTraits(groups=2)}
TIERS = {
    **SOME_TEXTS,
    **methods("look_up", "begin_with", "match_tiers", "load_prefix", "transfers_in_flight"),
    **methods("end_transfer", "restart_tiers"),
}
OFFERS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "block_tables": [BOOKS],
    "reading": [methods("gather")],
    "forks": [methods("fork")],
    "freeing": [methods("free")],
    "writes": [methods("append_many", "append_padded", "prefill", "reserve", "fill")],
    "switches": [{**methods("set_options"), "option_choices": {"fast": (True, False)}}],
    "counting": [{**methods("path_counts"), "paths": {"fast": FastPath(equals="slow")}}],
    "attention": [methods("attend")],
    "storage": [methods("table", "arena", "container")],
    "truncation": [methods("truncate", "truncate_many")],
    "prefixes": [
        {
            **SOME_TEXTS,
            **methods("look_up", "begin_with", "use_namespaces", "use_hash"),
            "prefixes": EQUAL,
        },
        SOME_TEXTS,
    ],
    "preemption": [methods("preempt", "resume")],
    "swapping": [methods("swap_out", "finish_swap_out", "swap_in", "finish_swap_in")],
    "windows": [WINDOWS, {**WINDOWS, **SOME_TEXTS}],
    "states": [methods("use_states", "peek_state")],
    "auxiliary_vectors": [
        {
            **methods("use_auxiliary_vectors", "peek_auxiliary_vectors"),
            "auxiliary_vectors": {"indexer key": AuxiliaryVector(4)},
        }
    ],
    "epochs": [{**BOOKS, **methods("reset", "use_tokens")}],
    "events": [methods("events", "match_prefix", "use_tokens")],
    "tiers": [TIERS],
    "text_keys": [{**BOOKS, **methods("use_text_keys", "use_tokens"), "key_parts": SALT}],
    "draft_trees": [methods("append_trees", "accept_paths")],
    "beams": [methods("reorder")],
    "disaggregation": [
        methods(
            *("make_remote", "remote_prefill", "begin_receive", "poll_receive", "finish_receive"),
            *("cancel_receive", "abort_remote", "transfers_in_flight", "end_transfer"),
        )
    ],
    "sessions": [
        {**BOOKS, **methods("keep_session", "resume_session", "release_session", "session_table")}
    ],
    "device_queue": [methods("use_queue")],
    "quantisation": [
        {**methods("scales"), "tolerance": {"int8": Tolerance(1 / 250)}, "dtypes": ("int8",)}
    ],
    "shards": [methods("shards")],
    "bad_calls": [methods("decref_blocks", "incref_blocks", "bad_calls")],
}
"""Definitions by which a cache offers a capability: the usual ones, and others for pairs in which
those are refused."""
REFUSED = {
    ("swapping", "windows"),
    ("windows", "events"),
    ("text_keys", "events"),
    ("windows", "quantisation"),
    ("tiers", "windows"),
    ("states", "draft_trees"),
    ("tiers", "draft_trees"),
    ("windows", "draft_trees"),
    ("epochs", "draft_trees"),
    ("states", "disaggregation"),
    ("tiers", "disaggregation"),
    ("windows", "disaggregation"),
    ("epochs", "disaggregation"),
    ("disaggregation", "quantisation"),
}
"""The pairs that no adapter can offer together."""
SIGNS: Mapping[str, Callable[[History], object]] = {
    "prefixes": lambda history: history.texts,
    "windows": lambda history: history.spec.windows,
    "quantisation": lambda history: history.spec.dtype == "int8",
    "text_keys": lambda history: isinstance(history.texts[0][-1], TextKey),
}
"""Signs in a history of capabilities that have no steps of their own."""


class Bare(KVCacheAdapter):
    make, append, peek = methods("make", "append", "peek").values()


KINDS = {
    each.methods.__module__.rpartition(".")[2]: {kind for kind in each.operations if kind.needs}
    for each in KVCacheAdapter.capabilities
}
"""The steps of each capability that need an ability."""


def offering(pair: tuple[str, str]) -> type[KVCacheAdapter] | None:
    """Return an adapter class that offers both; None where every one is refused."""
    for one, other in product(*(OFFERS[name] for name in pair)):
        adapter: type[KVCacheAdapter] = type("Both", (Bare,), {**one, **other})
        try:
            refuse_mistakes(adapter)
        except TypeError:
            continue
        return adapter
    return None


def shows(history: History, name: str, adapter: type[KVCacheAdapter]) -> bool:
    """Return True if a history has a step of a capability, or a sign of it."""
    if kinds := tuple(kind for kind in KINDS[name] if kind.needs <= adapter.abilities):
        return any(isinstance(step, kinds) for step in history.operations)
    return bool(history.operations and (name not in SIGNS or SIGNS[name](history)))


PAIRS = list(combinations(KINDS, 2))


def test_every_capability_is_paired() -> None:
    assert KINDS.keys() == OFFERS.keys()
    assert {pair for pair in PAIRS if offering(pair) is None} == REFUSED


@pytest.mark.sampled_cases
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in REFUSED], ids="-".join)
def test_pair_of_capabilities_is_drawn_together(pair: tuple[str, str]) -> None:
    adapter = offering(pair)
    assert adapter
    find(
        histories(adapter),
        lambda history: all(shows(history, name, adapter) for name in pair),
        settings=settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
        random=Random(1),
    )
