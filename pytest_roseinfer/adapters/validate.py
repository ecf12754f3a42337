"""Mistakes in an adapter class that show before anything is built."""

from __future__ import annotations

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.adapters.fast_path import FastPath
from pytest_roseinfer.adapters.names.condition_names import refuse_uncounted
from pytest_roseinfer.adapters.names.misspelt import refuse_misspelt
from pytest_roseinfer.adapters.names.signatures import refuse_signatures
from pytest_roseinfer.adapters.reuse_conditions import refuse_what_is_not_shown
from pytest_roseinfer.adapters.shapes import refuse_bound, refuse_shapes, refuse_tolerance
from pytest_roseinfer.adapters.standard_bad_calls import STANDARD_BAD_CALLS
from pytest_roseinfer.adapters.window_settings import refuse_windows
from pytest_roseinfer.oracle.declares import FORK_SHARES, SHARING

_FEWEST_REQUESTS = 6
"""Drawn mixes have so many at a time."""
_LOOKUP_CHOICES: dict[str, tuple[object, ...]] = {
    "match_granularity": ("block", "token"),
    "match_leaves": (0, 1),
    "match_finds": ("all", "some"),
    "evicts": ("any", "least recent"),
}

_SWAPPING = ("swap_out", "swapped_out", "swap_in", "swapped_in")
_NEEDS: dict[str, tuple[str, ...]] = {
    "logprobs": ("logits",),
    "top_logprobs": ("logprobs",),
    "prompt_logprobs": ("logits",),
    "pieces": ("decoded",),
    "namespaces": ("texts",),
    "reserve": ("fill",),
    "fill": ("reserve",),
    "preempt": ("resume",),
    "resume": ("preempt",),
    "look_up": ("begin_with", "texts"),
    "begin_with": ("look_up",),
    "matched": ("texts",),
    "arena": ("table",),  # else nothing says whose a block is, and a run would be green
    "ledger": ("table",),
    **dict.fromkeys(_SWAPPING, _SWAPPING),
}
"""For optional methods, others that they are nothing without: no step would call them."""


def refuse_mistakes(adapter: type[Adapter]) -> None:
    """Raise ``TypeError`` for a class that is no usable adapter; the message says why."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        hint = ""
        if isinstance(adapter, Adapter):
            made = type(adapter).__name__
            hint = f": write conformance({made}), for a cache is made anew for every history"
        raise TypeError(f"conformance() takes a subclass of KVCacheAdapter, not {adapter!r}{hint}")
    name = adapter.__name__
    refuse_misspelt(adapter)
    missing = [method for method in adapter.required if not adapter.defines(method)]
    if "append" in missing and "append_many" in adapter.abilities:
        missing.remove("append")
    if missing:
        raise TypeError(f"{name} must define {', '.join(missing)}")
    refuse_signatures(adapter)
    if issubclass(adapter, EngineAdapter):
        refuse_bound(adapter, "most_requests", _FEWEST_REQUESTS)
        _refuse_what_says_too_little(adapter)
    if issubclass(adapter, KVCacheAdapter):
        refuse_tolerance(adapter)
        refuse_shapes(adapter)
        refuse_what_is_not_shown(adapter)
        refuse_uncounted(adapter)
        refuse_windows(adapter)
        if not isinstance(adapter.atomic_batches, bool):
            raise TypeError(
                f"{name}.atomic_batches is {adapter.atomic_batches!r}: write False if an append "
                "that finds no room stores the rows ahead of the one that found none, else True"
            )
    for method in filter(adapter.abilities.__contains__, _NEEDS):
        if lacking := [other for other in _NEEDS[method] if not adapter.defines(other)]:
            raise TypeError(
                f"{name} defines {method} and must then define {', '.join(lacking)} too"
            )
    shares = getattr(adapter, "fork_shares", FORK_SHARES[0])
    if shares not in FORK_SHARES:
        known = ", ".join(map(repr, FORK_SHARES))
        raise TypeError(f"{name}.fork_shares is {shares!r}: choose one of {known}")
    _refuse_sharing(adapter)
    _refuse_unknown_bad_calls(adapter)
    for path_name, path in adapter.paths.items():
        if not isinstance(path, FastPath):
            twin = repr(path) if isinstance(path, str) else "..."
            raise TypeError(
                f"{name}.paths[{path_name!r}] is {path!r}: write FastPath(equals={twin})"
            )
        settings = (*path.runs_with, *path.never_with)
        if unknown := {switch for each in settings for switch in each} - {*adapter.option_choices}:
            raise TypeError(
                f"{name}.paths[{path_name!r}] names {', '.join(sorted(unknown))}, which "
                "option_choices has no values for"
            )


def _refuse_what_says_too_little(adapter: type[EngineAdapter]) -> None:
    by_logits = "logits" in adapter.abilities and not adapter.takes_sampling
    if not by_logits and "alone" not in adapter.abilities:
        raise TypeError(
            f"{adapter.__name__} must define alone, or logits where takes_sampling is False"
        )
    if adapter.never_idles and "stage" not in adapter.abilities:
        raise TypeError(
            f"{adapter.__name__}.never_idles is True and must be judged by stage: define that too"
        )


def _refuse_sharing(adapter: type[Adapter]) -> None:
    name, sharing = adapter.__name__, getattr(adapter, "sharing", SHARING[0])
    if sharing not in SHARING:
        known = ", ".join(map(repr, SHARING))
        raise TypeError(f"{name}.sharing is {sharing!r}: choose one of {known}")
    lacking = {"texts", "table", "ledger"} - adapter.abilities
    for attribute, choices in _LOOKUP_CHOICES.items():
        if (said := getattr(adapter, attribute, choices[0])) not in choices:
            raise TypeError(
                f"{name}.{attribute} is {said!r}, and must be {' or '.join(map(repr, choices))}"
            )
    for attribute, needing in (("sharing", "equal prefixes"), ("evicts", "least recent")):
        if lacking and getattr(adapter, attribute, None) == needing:
            raise TypeError(
                f"{name}.{attribute} is {needing!r}, which cannot be judged without "
                f"{' and '.join(sorted(lacking))}: define {'it' if len(lacking) == 1 else 'them'}"
            )


def _refuse_unknown_bad_calls(adapter: type[Adapter]) -> None:
    name, named = adapter.__name__, getattr(adapter, "standard_bad_calls", ())
    if unknown := [repr(each) for each in named if each not in STANDARD_BAD_CALLS]:
        known = ", ".join(map(repr, STANDARD_BAD_CALLS))
        raise TypeError(
            f"{name}.standard_bad_calls names {', '.join(unknown)}: choose from {known}"
        )
    for each in named:
        needs = STANDARD_BAD_CALLS[each].needs
        if missing := sorted(need for need in needs if need not in adapter.abilities):
            raise TypeError(
                f"{name}.standard_bad_calls names {each!r}, which needs {', '.join(missing)}"
            )
