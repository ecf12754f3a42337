"""Toy engines that find prompts in a prefix cache: a right one, and broken ones.

A broken one is found only behind another request, by two cold starts of one prompt, by a count of
its hits, or by the bits of a hit's logprobs.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer import EngineAdapter, PrefixReuseTraits
from tests.engine_capabilities.engines.drawing_engine import DrawingEngine

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pytest_roseinfer import RequestMix
    from tests.engine_capabilities.engines.drawing_engine import DrawnRequest


class PrefixEngine(DrawingEngine):
    """Stores blocks of prompts in slots, and reads a prompt from those that it finds. It is right.

    The block used longest ago is evicted.
    """

    prefix_reuse = PrefixReuseTraits(same_bits=True)
    block_sizes: ClassVar[Sequence[int]] = (2, 1, 4)

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        self.size = mix.block_size
        self.slots: list[list[int]] = [[]] * (mix.cache_tokens // mix.block_size)
        """Tokens of the block in each slot."""
        self.unused = list(range(len(self.slots)))
        self.slot_of: OrderedDict[Hashable, int] = OrderedDict()
        """Slot of each block by its key, the one used longest ago first."""
        self.cached: dict[DrawnRequest, int] = {}

    def step(self) -> None:
        starting = [each for each in self.requests if not each.ended][: self.batch]
        self.start([each for each in starting if each not in self.cached])
        super().step()

    def start(self, requests: Sequence[DrawnRequest]) -> None:
        for request in requests:
            prompt = request.prompt
            request.prompt = self.read(request)
            self.store(prompt, self.cached[request])

    def read(self, request: DrawnRequest) -> list[int]:
        """Return the prompt: the found blocks as they are stored, and what follows them."""
        prompt, found = request.prompt, list[int]()
        while len(found) + self.size < len(prompt):
            key = self.key(request.prompt[: len(found) + self.size])
            if key not in self.slot_of:
                break
            self.slot_of.move_to_end(key)
            found += self.slots[self.slot_of[key]]
        self.cached[request] = len(found)
        return [*found, *prompt[len(found) :]]

    def key(self, prefix: Sequence[int]) -> Hashable:
        return tuple(prefix)

    def store(self, prompt: Sequence[int], begin: int) -> None:
        for end in range(begin + self.size, len(prompt) + 1, self.size):
            self.slots[self.take_slot(prompt[:end])] = list(prompt[end - self.size : end])

    def take_slot(self, prefix: Sequence[int]) -> int:
        key = self.key(prefix)
        if key not in self.slot_of:
            full = not self.unused
            self.slot_of[key] = self.slot_of.popitem(last=False)[1] if full else self.unused.pop()
        return self.slot_of[key]

    def cached_tokens(self, request: DrawnRequest) -> int:
        return self.cached.get(request, 0)


class GoesOnFromTheLastPrompt(PrefixEngine):
    """T5: begins with what the last prompt of the found length left, as that of its own text."""

    def start(self, requests: Sequence[DrawnRequest]) -> None:
        for request in requests:
            prompt = request.prompt
            super().start([request])
            if found := self.cached[request]:
                request.prompt = [*self.left[found], *prompt[found:]]
            self.left |= {end: prompt[:end] for end in range(1, len(prompt) + 1)}

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        self.left: dict[int, list[int]] = {}


class FindsColdStartsOfItsStep(PrefixEngine):
    """T5: finds the blocks of a prompt that begins in the same step, before they are written."""

    def start(self, requests: Sequence[DrawnRequest]) -> None:
        prompts = [each.prompt for each in requests]
        for request, prompt in zip(requests, prompts, strict=True):
            request.prompt = self.read(request)
            for end in range(self.cached[request] + self.size, len(prompt) + 1, self.size):
                self.slots[self.take_slot(prompt[:end])] = [0] * self.size
        for request, prompt in zip(requests, prompts, strict=True):
            self.store(prompt, self.cached[request])


class ReadsAPromptOnItsPrefix(PrefixEngine):
    """T29: reads the whole prompt on top of the found prefix that it begins with."""

    def read(self, request: DrawnRequest) -> list[int]:
        prompt = super().read(request)
        return [*prompt[: self.cached[request]], *prompt]


class DropsPrefixesBesideAColdPrompt(PrefixEngine):
    """T21: reads no prefix of a step's prompts if the longest query is the longest context.

    That one has no prefix; shorter ones may have.
    """

    def start(self, requests: Sequence[DrawnRequest]) -> None:
        super().start(requests)
        queries = [len(each.prompt) - self.cached[each] for each in requests]
        contexts = [len(each.prompt) for each in requests]
        if max(queries, default=0) == max(contexts, default=0):
            for request in requests:
                request.prompt = request.prompt[self.cached[request] :]


class NeverFindsAPrompt(PrefixEngine):
    """Stores blocks by keys that no lookup has, so that all prompts are computed."""

    prefix_reuse = PrefixReuseTraits()
    logits: Any = EngineAdapter.logits  # not offered, as the four below: mixes are faster
    logprobs: Any = EngineAdapter.logprobs
    top_logprobs: Any = EngineAdapter.top_logprobs
    prompt_logprobs: Any = EngineAdapter.prompt_logprobs
    pieces: Any = EngineAdapter.pieces

    def key(self, prefix: Sequence[int]) -> Hashable:  # noqa: ARG002
        return object()


class RoundsTheLogprobsOfAHit(PrefixEngine):
    """Computes the logprobs of a prompt that was found in another order, which changes a bit."""

    def logprobs(self, request: DrawnRequest) -> list[float]:
        exact = super().logprobs(request)
        return (
            [math.nextafter(each, 0.0) for each in exact] if self.cached_tokens(request) else exact
        )


BROKEN = (
    GoesOnFromTheLastPrompt,
    FindsColdStartsOfItsStep,
    ReadsAPromptOnItsPrefix,
    DropsPrefixesBesideAColdPrompt,
    NeverFindsAPrompt,
    RoundsTheLogprobsOfAHit,
)
