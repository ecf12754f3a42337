"""Cancelling a request, which gets nothing more and holds nothing from then on."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixObserver,
    RequestCore,
    change,
)
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hypothesis import strategies as st
else:
    from pytest_roseinfer.capabilities import strategies as st


@dataclass(frozen=True, kw_only=True)
class CancelFields(RequestCore):
    """The step at which a request is cancelled."""

    cancel_after: int | None = None
    """Steps from its arrival until it is cancelled; None for one that runs to its end."""


class CancelMethods:
    """The method that cancels."""

    @optional
    def cancel(self, request: Any) -> None:
        """End a request, which may have finished already. Without it, none is cancelled."""


class Cancellations(MixObserver):
    """Cancels requests when their time has come, and sees that they end."""

    needs = ("cancel",)

    def act(self, step: int) -> str:
        adapter = self.run.adapter
        for each in self.run.served:
            after = each.spec.cancel_after
            if after is not None and each.spec.arrival + after == step:
                each.cancelled = not adapter.is_finished(each.request)
                adapter.cancel(each.request)
                if not adapter.is_finished(each.request):
                    return f"{each.name} was cancelled and goes on"
        return ""


def draw_cancel_after(draw: st.DrawFn) -> int | None:
    """Draw when a request of a crowd is cancelled, if it is."""
    after: int | None = draw(st.sampled_from((None, None, None, None, 0, 1, 2, 4, 8)))
    return after


def let_run(adapter: type[Any], spec: Any) -> Any:
    """Return a request that nobody cancels, for an engine that cannot."""
    return spec if adapter.defines("cancel") else change(spec, cancel_after=None)


def words(spec: CancelFields) -> Iterator[str]:
    if spec.cancel_after is not None:
        yield f"cancelled {some(spec.cancel_after, 'step')} later"


CANCEL = EngineCapability(
    methods=CancelMethods,
    fields=(CancelFields,),
    restrict=let_run,
    words=words,
    observers=(Cancellations,),
)
