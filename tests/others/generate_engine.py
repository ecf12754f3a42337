"""Adapter of transformers' ``generate``: batches of waiting requests, padded on the left.

The slow twin calls the model without a cache.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.capabilities.cache_data import FastPath
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from tests.others.family_models import PADDING, VOCABULARY, logits_of, model_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.adapters.engine import RequestMix, Sampling

# The engine.

_ALONE = "all anew"


class GenerateEngine(EngineAdapter):
    """``generate`` for all waiting requests at once."""

    vocabulary = VOCABULARY
    sampling = SamplingTraits(greedy_only=True)
    block_sizes: ClassVar[Sequence[int]] = (4,)  # it has none
    paths: ClassVar[Mapping[str, FastPath]] = {
        "batch": FastPath(_ALONE),
        "chunked prefill": FastPath(_ALONE, aims=[{"prefill_chunk_size": 3}]),
    }
    families: ClassVar[Sequence[str]] = ("Llama", "Mistral", "Lfm2", "Qwen3Next")
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "prefill_chunk_size": (None, 3),
        "cache": ("dynamic", "static"),
    }

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()
        cls.option_choices = {**cls.option_choices, "family": cls.families}

    def make(self, mix: RequestMix) -> None:
        transformers.logging.set_verbosity_error()
        self.options, self.model = mix.options, model_of(mix.options["family"])
        self.waiting: list[Any] = []
        self.counts: Counter[str] = Counter()

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        request = SimpleNamespace(prompt=list(prompt), tokens=[], finished=False)
        request.max_new_tokens = sampling.max_new_tokens
        self.waiting.append(request)
        return request

    def step(self) -> None:
        requests, self.waiting = self.waiting, []
        if not requests:
            return
        length = max(len(each.prompt) for each in requests)
        pads = [length - len(each.prompt) for each in requests]
        rows = zip(pads, requests, strict=True)
        prompts = torch.tensor([[PADDING] * pad + each.prompt for pad, each in rows])
        mask = torch.tensor([[0] * pad + [1] * (length - pad) for pad in pads])
        chunk = self.options["prefill_chunk_size"]
        settings = {} if chunk is None else {"prefill_chunk_size": chunk}
        if self.options["cache"] == "static":
            settings |= {"cache_implementation": "static", "disable_compile": True}
        texts = self.model.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=max(each.max_new_tokens for each in requests),
            do_sample=False,
            **settings,
        )
        self.counts["batch"] += len(requests) > 1
        self.counts["chunked prefill"] += chunk is not None and length > chunk
        for request, text in zip(requests, texts.tolist(), strict=True):
            request.tokens = text[length : length + request.max_new_tokens]
            request.finished = True

    def tokens(self, request: Any) -> list[int]:
        return list(request.tokens)

    def is_finished(self, request: Any) -> bool:
        return bool(request.finished)

    def find_leaks(self) -> str:
        return f"{len(self.waiting)} requests" if self.waiting else ""

    def path_counts(self) -> Mapping[str, int]:
        return self.counts

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:
        return logits_of(mix.options["family"], tuple(tokens))


GenerateEngine.option_choices = {
    **GenerateEngine.option_choices,
    "family": GenerateEngine.families,
}


class GeneratesMiniMax(GenerateEngine):
    families = ("MiniMax",)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "prefill_chunk_size": (None,),
        "cache": ("dynamic",),
    }


class GeneratesJamba(GenerateEngine):
    families = ("Jamba",)


class GeneratesRecurrentGemma(GenerateEngine):
    families = ("RecurrentGemma",)
    option_choices = GeneratesMiniMax.option_choices
