"""Guides with judges of completions that are independent of grammars."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from roseinfer import LLM, Guide, SamplingParams
from tests.engine.test_random_mixes import assert_no_block_is_lost

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from roseinfer import RequestOutput


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Person(Strict):
    name: str = Field(max_length=4)
    age: int = Field(ge=0, le=150)
    tags: list[Literal["a", "bé", "c d"]] = Field([], max_length=2)


class Place(Strict):
    at: tuple[bool, bool]
    owner: Person | None


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


WORDS = ("yes", "no", "nono", "né", "好的")
PATTERN = "[a-z]{1,3}(é|好){0,2}:[0-9]{1,3}"


def is_one_of(text: str) -> bool:
    return text in WORDS


def matches(text: str) -> bool:
    return re.fullmatch(PATTERN, text) is not None


def follows_schema(kind: type[BaseModel]) -> Callable[[str], bool]:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def judge(text: str) -> bool:
        json.loads(text)
        try:
            adapter.validate_json(text)
        except ValidationError:
            return False
        return text.lstrip().startswith("{")

    return judge


@dataclass(frozen=True)
class JudgedGuide:
    guide: Guide
    judge: Callable[[str], bool]


JUDGED_GUIDES = {
    "an object": JudgedGuide(Guide(json_object=True), follows_schema(Anything)),
    "a schema": JudgedGuide(Guide(json_schema=Person.model_json_schema()), follows_schema(Person)),
    "a deep schema": JudgedGuide(
        Guide(json_schema=Place.model_json_schema()), follows_schema(Place)
    ),
    "a regular expression": JudgedGuide(Guide(regex=PATTERN), matches),
    "words": JudgedGuide(Guide(choice=WORDS), is_one_of),
    "a grammar": JudgedGuide(
        Guide(grammar='start: ("x" | "yé")~1..3 "."'), lambda text: text[-1] == "."
    ),
}
SIZES: dict[str, Any] = {"block_size": 4, "kv_cache_tokens": 4000, "dtype": "float32"}
SETTINGS: dict[str, dict[str, Any]] = {
    "no slots": {"resident_decode": False},
    "slots": {"resident_decode": True},
    "far ahead": {"resident_decode": True, "run_ahead": 4},
    "batch of two": {"resident_decode": True, "run_ahead": 2, "max_batch_size": 2},
    "chunks": {"resident_decode": False, "prefill_max_tokens": 3},
    "per-layer blocks": {"resident_decode": False, "per_layer_kv": True},
    "few blocks": {"resident_decode": False, "kv_cache_tokens": 140},
    "few blocks and slots": {"resident_decode": True, "run_ahead": 2, "kv_cache_tokens": 140},
    "speculation": {"resident_decode": False, "speculation": "ngram"},
    "speculation and slots": {"resident_decode": True, "run_ahead": 2, "speculation": "ngram"},
    "no prefix cache": {"resident_decode": True, "prefix_cache": False},
}


def engine(device: str, **config: Any) -> LLM:
    """Build an engine whose cache is full of NaN."""
    llm = LLM("tiny", device=device, **(SIZES | config))
    kv = llm.engine.sequence_runner.kv
    for cache in (kv.keys, kv.values):
        cache.fill_(float("nan"))
    return llm


def draw_params(rng: random.Random, judged: JudgedGuide | None, **more: Any) -> SamplingParams:
    """Draw sampling parameters of all kinds."""
    drawn: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.7, 1.5)),
        "top_k": rng.choice((0, 0, 3)),
        "top_p": rng.choice((1.0, 0.8)),
        "frequency_penalty": rng.choice((0.0, 0.0, 0.5)),
        "seed": rng.randrange(1 << 40),
        "max_new_tokens": rng.randint(20, 60),
        "guide": judged.guide if judged else None,
    }
    return SamplingParams(**(drawn | more))


def draw_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randint(1, 30))]


def generate_all(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    outputs = llm.generate(list(prompts), list(params), progress=False)
    assert not llm.engine.has_work
    assert_no_block_is_lost(llm)
    return outputs
