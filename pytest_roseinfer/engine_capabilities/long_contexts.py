"""Long contexts: a few requests that are longer than what a path computes in one part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer import settings
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixCondition,
    MixObserver,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import EngineRun, ServedRequest
else:
    from pytest_roseinfer.capabilities import strategies as st


class LongContextMethods:
    """Declaration of the paths that compute a long context in another way."""

    long_contexts: ClassVar[Mapping[str, int]] = {}
    """Tokens of a context beyond which a path runs other code, by the path's name: for example the
    part of a context that one kernel program attends to. Half of the mixes that aim at the path
    have a request with such a context, which ``max_tokens`` does not limit."""


LONG_CONTEXT = "context_longer_than_a_part"
_MORE_TOKENS = (2, 1, 5, 12)
"""Tokens of a long prompt beyond the limit."""


def limited_paths(adapter: type[Any], device: str) -> list[str]:
    """Return the paths with a limit that run on a device."""
    return [name for name in adapter.long_contexts if adapter.paths[name].runs_on(device)]


def draw_long_path(draw: st.DrawFn, adapter: type[Any], aim: str | None, device: str) -> str | None:
    """Draw the path whose limit a request of the mix exceeds; None for a mix without one.

    Without an aim, few mixes have one.
    """
    paths = limited_paths(adapter, device)
    if aim is not None:
        return aim if aim in paths and draw(st.sampled_from((True, False))) else None
    rarely = (None,) * 11
    path: str | None = draw(st.sampled_from((*rarely, *paths)))
    return path


def draw_long_length(draw: st.DrawFn, adapter: type[Any], path: str) -> int:
    """Draw the length of a prompt that exceeds the limit of a path."""
    return int(adapter.long_contexts[path]) + int(draw(st.sampled_from(_MORE_TOKENS)))


class LongContexts(MixObserver):
    """Counter of requests that exceed the limit of a path which their mix allows."""

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        adapter, mix = run.adapter, run.mix
        self._limits = [
            limit
            for name, limit in adapter.long_contexts.items()
            if adapter.paths[name].can_run(mix.options, mix.device)
        ]

    def note(self, served: ServedRequest) -> None:
        before, now = (
            len(served.spec.prompt) + tokens
            for tokens in (served.num_tokens_before, len(served.tokens))
        )
        first = served.num_tokens_before == 0 < len(served.tokens)
        self.counts[LONG_CONTEXT] += any(
            now > limit and (first or before <= limit) for limit in self._limits
        )


def refuse_unknown_paths(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a limit of a path that is not declared."""
    for name in adapter.long_contexts:
        if name not in adapter.paths:
            raise TypeError(
                f"{adapter.__name__}.long_contexts names {name!r}, which is not among its paths"
            )


def _runs_long_contexts(adapter: type[Any]) -> bool:
    return bool(limited_paths(adapter, settings.current().device))


LONG_CONTEXTS = EngineCapability(
    methods=LongContextMethods,
    observers=(LongContexts,),
    conditions=(
        MixCondition(
            LONG_CONTEXT,
            "A request had a context beyond the limit in ``long_contexts`` of a path that could "
            "run.",
            _runs_long_contexts,
        ),
    ),
    refuse=(refuse_unknown_paths,),
)
