"""What a server needs of an engine, wherever that runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.engine.engine import Engine
    from roseinfer.engine.request_room import RequestRoom
    from roseinfer.engine_process.part import Part
    from roseinfer.guided.guide import Guide
    from roseinfer.llm import LLM
    from roseinfer.models.shape import ModelShape
    from roseinfer.sampling_params import SamplingParams

GUIDES_AT_ONCE = 16
"""Threads that check guides: more than there can be guides that take long."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What never changes of an engine. All of it can be pickled."""

    tokenizer: Any
    """None for a model without one."""
    shape: ModelShape
    room: RequestRoom
    max_batch_size: int
    why_batch_variant: str | None
    """The reason why a request's bits depend on its batch; None where they do not."""

    @classmethod
    def of(cls, llm: LLM) -> Facts:
        engine, most = llm.engine, llm.config.max_batch_size
        shape = engine.sessions.model.shape
        return cls(llm.tokenizer, shape, engine.room, most, llm.why_batch_variant)


class Figures(NamedTuple):
    """What an engine does at a moment, and what it has done so far."""

    blocks: int
    held: int
    cached: int
    running: int
    waiting: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    steps: tuple[int, ...]
    """How many steps had how many tokens, by the bounds of the engine's histogram."""
    step_tokens: float
    """The tokens of all steps."""
    drafts: int = 0
    drafted: int = 0
    """How many tokens all drafts had."""
    accepted_at: tuple[int, ...] = ()
    """How many drafts had their first token accepted, their second and so on. It is empty for an
    engine that drafts nothing."""

    @classmethod
    def at_first(cls, blocks: int) -> Figures:
        """Return those of an engine that has done nothing."""
        return cls(blocks, 0, 0, 0, 0, 0, 0, 0, (), 0.0)

    @classmethod
    def of(cls, engine: Engine) -> Figures:
        speculation, steps = engine.speculation, engine.step_tokens
        drafts = (
            (speculation.num_drafts, speculation.num_drafted, tuple(speculation.accepted_at))
            if speculation
            else ()
        )
        return cls(
            *engine.occupancy,
            engine.num_running,
            engine.num_waiting,
            engine.prefix_queries,
            engine.prefix_hits,
            engine.num_preemptions,
            tuple(steps.counts),
            steps.total,
            *drafts,
        )


class Texts(Protocol):
    """Texts of one task, which must ``leave`` in the end: those that have not ended are cancelled.

    They are numbered from 0, in the order in which they are added.
    """

    def add(self, token_ids: Sequence[int], params: SamplingParams) -> None: ...

    async def next(self) -> list[tuple[int, Part]]:
        """Wait for something to come, and return all of it: a part for each text that has one."""

    def leave(self) -> None: ...


class ServedEngine(Protocol):
    """An engine that serves the tasks of one loop."""

    @property
    def apart(self) -> bool:
        """True if it shares no interpreter with what it serves."""

    @property
    def facts(self) -> Facts: ...

    @property
    def figures(self) -> Figures: ...

    @property
    def closed(self) -> bool:
        """True if nothing is served any more: it was closed, or the engine has stopped."""

    @property
    def restarting(self) -> bool:
        """True while the engine's process is started again, after one that has ended."""

    @property
    def restarts(self) -> int:
        """Times that the engine's process was started again."""

    @property
    def stalled_s(self) -> float:
        """Seconds without a step though there is work; 0 where nobody watches that."""

    async def open(self) -> None:
        """Begin to listen, in the loop that serves."""

    def texts(self) -> Texts: ...

    async def check_guide(self, guide: Guide) -> None:
        """Raise for a guide that cannot be followed. One that can is prepared then."""

    def close(self) -> None:
        """End it, and the texts that are left with an error. Any other thread may call this."""
