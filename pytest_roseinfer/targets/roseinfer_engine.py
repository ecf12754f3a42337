"""This distribution's own engine, serving small models."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.targets.own import engine_models as models
from pytest_roseinfer.targets.own import model_shapes as shapes
from pytest_roseinfer.targets.own.alone import alone, undecided
from pytest_roseinfer.targets.own.engine_fast_paths import PATHS
from pytest_roseinfer.targets.own.engine_switches import OPTION_CHOICES, RUN_AHEAD, SIZES
from pytest_roseinfer.targets.own.engine_tokenizers import text_of, tokenizer
from pytest_roseinfer.targets.own.forked_sequences import forked, params
from pytest_roseinfer.targets.own.held_blocks import held_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.adapters.mix import RequestMix, Sampling

_served = lru_cache(maxsize=16)(models.network)


class RoseinferEngine(EngineAdapter):
    """``LLM``, driven step by step on a cache full of NaN."""

    vocabulary = shapes.VOCABULARY
    most_tokens = shapes.POSITIONS
    lag = max(RUN_AHEAD)
    never_idles = True
    takes_min_p = True
    takes_counted_penalties = True
    paths = PATHS
    option_choices = OPTION_CHOICES
    longest = shapes.LONG_POSITIONS
    sizes = SIZES

    def make(self, mix: RequestMix) -> None:
        from roseinfer import LLM  # with transformers, which takes seconds

        options = dict(mix.options)
        options["resident_decode"] &= not options["per_layer_kv"]
        model = options.pop("model")
        self._tokenizer = tokenizer(byte_level="gpt2" in model)
        self._shown: defaultdict[int, list[str]] = defaultdict(list)
        self.llm = LLM(
            _served(model, mix.device),
            tokenizer=self._tokenizer,
            device=mix.device,
            block_size=mix.block_size,
            kv_cache_tokens=mix.cache_tokens,
            **options,
        )
        self.engine = self.llm.engine
        kv = self.engine.sessions.kv
        for cache in (kv.keys, kv.values):
            cache.fill_(float("nan"))

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        return self.engine.submit(prompt, params(sampling))

    def cancel(self, request: Any) -> None:
        self.engine.cancel(request)

    def step(self) -> None:
        for update in self.engine.step():
            self._shown[update.request.id].append(update.text)

    def tokens(self, request: Any) -> list[int]:
        return list(request.token_ids)

    def ended(self, request: Any) -> bool:
        return request.finish_reason is not None

    def leftovers(self) -> str:
        if self.engine.prefixes is not None:
            self.engine.prefixes.clear()
        return held_blocks(self.engine.sessions.kv)

    def path_counts(self) -> Mapping[str, int]:
        return {str(name): count for name, count in self.engine.path_counts.items()}

    def alone(self, prompt: Sequence[int], sampling: Sampling, mix: RequestMix) -> list[int]:
        return list(alone(mix.options["model"], mix.device, tuple(prompt), sampling))

    def forked(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        return forked(self.engine.sessions, prompt, samplings)

    def undecided(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
        return undecided(mix, tuple(tokens), sampling, self.rounding)

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Sequence[float]:
        return [*map(float, models.logits(mix.options["model"], mix.device, tuple(tokens)))]

    def logprobs(self, request: Any) -> Any:
        return request.logprobs

    def top_logprobs(self, request: Any) -> Any:
        return request.top_logprobs

    def prompt_logprobs(self, request: Any) -> Any:
        return request.prompt_logprobs

    def pieces(self, request: Any) -> Sequence[str]:
        return self._shown[request.id]

    def decoded(self, tokens: Sequence[int]) -> str:
        return text_of(tokens, self._tokenizer)

    def stage(self, request: Any) -> str:
        if not (request.session.stored or request.in_flight):
            return "preempted" if request.preempted else "waiting"
        return "decoding" if request.pending == 1 else "prefilling"

    def cached_tokens(self, request: Any) -> int:
        return int(request.found)
