"""Prefix reuse: tokens of prompts that are served from the prefix cache, and how many must be."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pytest_roseinfer.capabilities.capability import Traits, optional
from pytest_roseinfer.capabilities.return_values import is_number, returns
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixCondition,
    MixObserver,
    change,
)
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import EngineRun, ServedRequest


@dataclass(frozen=True)
class PrefixReuseTraits(Traits):
    """Promises of an engine about the prompts that it finds in its prefix cache."""

    finds: Literal["some", "full blocks"] = "some"
    """``full blocks`` if a prompt begins with all full blocks that it shares with the text of an
    ended request, except that its last token is always computed. Blocks may be missing only after
    an eviction, and nothing is evicted while there is room for all texts."""
    evicts: Literal["any", "least recent"] = "any"
    """``least recent`` if the text that was not used for the longest time is evicted first, so that
    others are found again."""
    evicts_from_end: dict[str, tuple[Any, ...]] | None = None
    """Values of switches under which a text loses its last blocks first. A prompt then begins with
    the blocks that are left, whatever else was evicted. Empty means all values; None means that the
    engine promises no such order. Only with ``finds="full blocks"``."""
    enabled_by: dict[str, Any] = field(default_factory=dict)
    """Values of switches without which nothing is promised."""
    same_bits: bool = False
    """True if a hit gives the same logprobs as a prompt that is computed, bit for bit and in any
    batch. Needs ``logprobs``, which each request then gets."""


class PrefixReuseMethods:
    """Adapter methods for the prefix cache."""

    prefix_reuse: ClassVar[PrefixReuseTraits] = PrefixReuseTraits()
    """Promises about the prompts that are found."""

    @optional
    @returns(is_number, "a number of tokens")
    def cached_tokens(self, request: Any) -> int:
        """Return the number of tokens that were served from the prefix cache.

        It counts the request's latest start; a preempted request starts again. It is never more
        than the request can share with texts that were computed before, and with ``prefix_reuse``
        not less than the engine promises.
        """


FOUND = "prompt_found_again"
FOUND_AFTER_EVICTION = "prompt_found_after_eviction"
FOUND_IN_PART = "prompt_found_in_part_after_eviction"
HIT, HIT_BEHIND_ANOTHER = "prompt_hit", "prompt_hit_behind_another"
COLD_STARTS, BITS_COMPARED = "cold_starts_of_one_prompt", "prompt_hit_compared_with_computed"
_CONCLUSIVE_MIXES = 100
"""Mixes without any hit that fail a run; a right engine has hits in about half of its mixes."""
_SPARE = 8
"""Divisor of the cache's blocks: one in this many may be evicted early."""


@dataclass(slots=True)
class _Use:
    """The use of the cache by one request."""

    submitted: int
    """Step before which it was submitted."""
    ended: int | None = None
    """Step after which it had ended; None before."""
    cached: int = 0
    """Number of cached tokens after the latest step."""
    may_be_restarted: bool = False
    """True once it may have started before the latest step."""
    is_hit: bool = False
    """True if it began with tokens that another request had stored."""
    text: Sequence[int] = ()
    """Its prompt and tokens; those of a cancelled request stay, which an engine may drop."""
    logprobs: Sequence[float] = ()
    """Logprobs of its tokens, where they are to be the same bits for each request of its prompt."""


class PrefixReuse(MixObserver):
    """Judge of the number of tokens that are served from the prefix cache."""

    any_of = ("cached_tokens",)

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        self._step = 0
        self._uses: dict[int, _Use] = {}
        """Use of each request, by its number."""

    def act(self, step: int) -> str:
        self._step = step
        return ""

    def note(self, served: ServedRequest) -> None:
        if served.number not in self._uses:
            self._uses[served.number] = _Use(self._step)
            self._count_cold_start(served)
        use = self._uses[served.number]
        text = [*served.spec.prompt, *served.tokens]
        use.text = max(use.text, text, key=len)
        if not served.finished:
            use.cached = self.run.adapter.cached_tokens(served.request)

    def judge(self, served: ServedRequest) -> str:
        use = self._uses[served.number]
        problem = ""
        if use.ended is None:
            first = bool(served.tokens) and not served.num_tokens_before
            problem = self._too_many(served, use) or (self._too_few(served, use) if first else "")
            if use.cached and not (use.is_hit or use.may_be_restarted):
                use.is_hit = True
                self._count_hit(served, use)
            use.may_be_restarted = use.may_be_restarted or self._has_begun(served, use)
        if served.finished and use.ended is None:
            use.ended = self._step
            problem = problem or self._other_bits(served, use)
        return problem

    def _count_cold_start(self, served: ServedRequest) -> None:
        """Count two requests of one step that share a block, which no earlier one has."""
        size = self.run.mix.block_size
        of_one_step = [
            self._uses[other.number].submitted == self._step
            for other in self._others(served)
            if _shared(served.spec.prompt, self._uses[other.number].text or other.spec.prompt)
            >= size
        ]
        self.counts[COLD_STARTS] += len(of_one_step) == 1 and of_one_step[0]

    def _others(self, served: ServedRequest) -> list[ServedRequest]:
        known = (each for each in self.run.served if each.number in self._uses)
        return [each for each in known if each is not served]

    def _count_hit(self, served: ServedRequest, use: _Use) -> None:
        """Count a hit. If another request came in between, it is a hit behind another text too."""
        self.counts[HIT] += 1
        prompt, others = served.spec.prompt, self._others(served)
        uses = [(self._uses[each.number], _shared(prompt, each.spec.prompt)) for each in others]
        ends = [one.ended for one, shared in uses if one.ended is not None and shared >= use.cached]
        self.counts[HIT_BEHIND_ANOTHER] += any(
            min(ends, default=use.submitted) < one.submitted < use.submitted
            for one, shared in uses
            if shared < use.cached
        )

    def _other_bits(self, served: ServedRequest, use: _Use) -> str:
        """Compare the logprobs of a hit and of requests that computed the same prompt."""
        adapter = self.run.adapter
        wanted = getattr(served.spec.sampling, "logprobs", False)
        if not (adapter.prefix_reuse.same_bits and wanted) or served.cancelled:
            return ""
        use.logprobs = [*adapter.logprobs(served.request)]
        for other in self._others(served):
            of_other = self._uses[other.number]
            if other.spec.prompt != served.spec.prompt or not of_other.logprobs:
                continue
            if bool(use.cached) == bool(of_other.cached):
                continue
            self.counts[BITS_COMPARED] += 1
            same = _shared(served.tokens, other.tokens)
            for at, (one, two) in enumerate(
                zip(use.logprobs[:same], of_other.logprobs, strict=False)
            ):
                if one != two:
                    own, others = ("found", "computed") if use.cached else ("computed", "found")
                    return (
                        f"{served.name}, whose prompt was {own}, has logprob {one!r} of token "
                        f"{at}; request {other.number}, whose equal prompt was {others}, has "
                        f"{two!r}: they must be the same bits"
                    )
        return ""

    def _has_begun(self, served: ServedRequest, use: _Use) -> bool:
        """Return True unless it is known to have been waiting until now."""
        adapter = self.run.adapter
        if served.finished or served.tokens:
            return True
        if adapter.defines("stage"):
            return bool(adapter.stage(served.request) != "waiting")
        return self._step > use.submitted

    def _too_many(self, served: ServedRequest, use: _Use) -> str:
        """Judge the upper bound: the longest prefix that another text has, or its own."""
        most, prompt = len(use.text), served.spec.prompt
        if not use.may_be_restarted:
            others = (each.text for number, each in self._uses.items() if number != served.number)
            most = max((_shared(prompt, text) for text in others), default=0)
        if use.cached <= most:
            return ""
        return (
            f"{served.name} began with {format_count(use.cached, 'cached token')}; it shares "
            f"{most} with the texts before it"
        )

    def _too_few(self, served: ServedRequest, use: _Use) -> str:
        """Judge the lower bound, where the engine promises one."""
        mix, traits = self.run.mix, self.run.adapter.prefix_reuse
        enabled = traits.enabled_by.items() <= mix.options.items()
        if traits.finds != "full blocks" or not enabled:
            return ""
        if _is_computed_again(served):
            return ""
        known = [each for each in self.run.served if each.number in self._uses]
        for other in known:
            of_other = self._uses[other.number]
            if of_other.ended is None or of_other.ended > use.submitted or other.cancelled:
                continue
            stored = of_other.text[:-1]  # the last token is never stored
            shared = _shared(served.spec.prompt[:-1], stored) // mix.block_size * mix.block_size
            used_since = known
            if traits.evicts == "least recent":
                used_since = [each for each in known if self._is_used_since(each, of_other)]
            left = shared
            if not self._fits(used_since, shared):
                left = min(shared, self._tokens_left(used_since, served, other))
            if left <= 0:
                continue
            if use.cached < left:
                of = "" if left == shared else f"first {left} of the "
                return (
                    f"{served.name} began with {format_count(use.cached, 'cached token')}; the "
                    f"cache has room for the {of}{shared} that it shares with request "
                    f"{other.number}"
                )
            self.counts[FOUND] += left == shared
            self.counts[FOUND_AFTER_EVICTION] += left == shared and not self._fits(known, shared)
            self.counts[FOUND_IN_PART] += left < shared
        return ""

    def _tokens_left(
        self, used_since: Sequence[ServedRequest], served: ServedRequest, other: ServedRequest
    ) -> int:
        """Return the first tokens of another text that must be left for a request."""
        mix, order = self.run.mix, self.run.adapter.prefix_reuse.evicts_from_end
        if order is None or any(mix.options[name] not in values for name, values in order.items()):
            return 0
        if self._room_beside([served]) < 0:
            return 0  # a request that hardly fits may empty the cache for itself
        if _is_computed_again(other):
            return 0  # it may have evicted its own blocks
        used = [each for each in used_since if each.number not in (served.number, other.number)]
        return self._room_beside(used) * int(mix.block_size)

    def _is_used_since(self, each: ServedRequest, other: _Use) -> bool:
        ended = self._uses[each.number].ended
        return ended is None or ended > other.submitted

    def _fits(self, used: Sequence[ServedRequest], shared: int) -> bool:
        """Return True if the cache has room for the texts of all these requests together.

        Two of them have the ``shared`` first tokens in the same blocks.
        """
        return self._room_beside(used) + shared // int(self.run.mix.block_size) >= 0

    def _room_beside(self, used: Sequence[ServedRequest]) -> int:
        """Return how many blocks these requests' texts leave; negative if they do not fit.

        Each text may take one block more, for a copy of a partial block.
        """
        size = self.run.mix.block_size
        again = [each for each in used if _is_computed_again(each)]
        blocks = sum(-(-_most_tokens(each) // size) + 1 for each in [*used, *again])
        capacity = self.run.mix.cache_tokens // size
        return int(capacity - capacity // _SPARE - blocks)


def _is_computed_again(served: ServedRequest) -> bool:
    """Return True for a prompt whose logprobs are wanted: it is computed although it is cached."""
    return bool(getattr(served.spec.sampling, "prompt_logprobs", False))


def _most_tokens(served: ServedRequest) -> int:
    return len(served.spec.prompt) + max(len(served.expected), len(served.tokens))


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _finds_full_blocks(adapter: type[Any]) -> bool:
    return bool(adapter.defines("cached_tokens") and adapter.prefix_reuse.finds == "full blocks")


def _evicts_least_recent(adapter: type[Any]) -> bool:
    return _finds_full_blocks(adapter) and adapter.prefix_reuse.evicts == "least recent"


def _evicts_from_end(adapter: type[Any]) -> bool:
    return _finds_full_blocks(adapter) and adapter.prefix_reuse.evicts_from_end is not None


def _shows_hits(adapter: type[Any]) -> bool:
    return bool(adapter.defines("cached_tokens"))


def _promises_bits(adapter: type[Any]) -> bool:
    return _shows_hits(adapter) and bool(adapter.prefix_reuse.same_bits)


def draw_logprobs(_: st.DrawFn, adapter: type[Any], spec: Any) -> Any:
    """Let each request have logprobs where hits are compared by them."""
    return change(spec, logprobs=True) if _promises_bits(adapter) else spec


def refuse_bits_without_logprobs(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a promise about logprobs that an adapter does not show."""
    missing = [name for name in ("cached_tokens", "logprobs") if not adapter.defines(name)]
    if adapter.prefix_reuse.same_bits and missing:
        raise TypeError(
            f"{adapter.__name__}.prefix_reuse.same_bits is True, which cannot be judged without "
            f"{' and '.join(missing)}: define {'it' if len(missing) == 1 else 'them'}"
        )


def refuse_order_of_some_blocks(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a promised order of the blocks of texts that need not be found."""
    reuse = adapter.prefix_reuse
    if reuse.evicts_from_end is not None and reuse.finds != "full blocks":
        raise TypeError(
            f"{adapter.__name__}.prefix_reuse.evicts_from_end is set, and finds is "
            f"{reuse.finds!r}: only 'full blocks' can be judged"
        )


PREFIX_REUSE = EngineCapability(
    methods=PrefixReuseMethods,
    draw=draw_logprobs,
    observers=(PrefixReuse,),
    refuse=(refuse_bits_without_logprobs, refuse_order_of_some_blocks),
    conditions=(
        MixCondition(
            HIT,
            "A prompt began with tokens that another request stored.",
            _shows_hits,
            conclusive_examples=_CONCLUSIVE_MIXES,
        ),
        MixCondition(
            HIT_BEHIND_ANOTHER,
            "The same, where a request with another text came in between.",
            _shows_hits,
        ),
        MixCondition(
            COLD_STARTS,
            "Two requests of one step shared a block that no earlier request had.",
            _shows_hits,
        ),
        MixCondition(
            BITS_COMPARED,
            "The logprobs of a prompt that was found were compared with those of the same prompt, "
            "which was computed.",
            _promises_bits,
        ),
        MixCondition(
            FOUND,
            "A prompt shared full blocks with a text that had ended and that must still be stored.",
            _finds_full_blocks,
        ),
        MixCondition(
            FOUND_AFTER_EVICTION,
            "The same, where other texts had to be evicted.",
            _evicts_least_recent,
        ),
        MixCondition(
            FOUND_IN_PART,
            "A prompt shared blocks with a text of which only the first must still be stored.",
            _evicts_from_end,
        ),
    ),
)
