"""The wide mixes that every engine gets: many requests at a time.

Drawn ones have few, since many of them find more. But a batch has rows that only a wide one has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.mix import Asked, RequestMix, Sampling
from pytest_roseinfer.engines.common_text import common_text
from pytest_roseinfer.engines.offered import as_offered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.adapters.engine import EngineAdapter

_WAVES = ((0, 9, 16), (2, 8, 14), (4, 18, 9))
"""The step at which requests arrive, how many do, and the most tokens each gets: 9, 17 and 35 at a
time, one or more beyond what a program often takes."""
REQUESTS = sum(many for _, many, _ in _WAVES)
_LONGEST = 11


def wide_mix(adapter: type[EngineAdapter], options: Mapping[str, Any], device: str) -> RequestMix:
    """Make requests of mixed lengths for an engine with these switches and room for all.

    Every fourth goes on where the prompt of the one before it ends, and some are drawn or have a
    penalty. They end one by one, so that those behind them move up.
    """
    asked: list[Asked] = []
    for arrives, many, tokens in _WAVES:
        for _ in range(many):
            asked.append(_request(adapter, len(asked), arrives, tokens, asked))
    asked = asked[: adapter.most_requests]
    size = min(adapter.block_sizes, key=lambda each: abs(each - 4))
    room = sum(each.most_tokens + size for each in asked)
    return RequestMix(tuple(asked), size, room, device, options)


def _request(
    adapter: type[EngineAdapter], number: int, arrives: int, tokens: int, before: list[Asked]
) -> Asked:
    new = min(tokens - number % 3, adapter.most_tokens // 3)
    longest = adapter.most_tokens - new
    prompt = common_text(1 + number * 5 % _LONGEST, adapter.vocabulary, number)
    if number % 4 == 1:
        prompt = before[-1].prompt + prompt
    sampling = Sampling(
        new,
        temperature=float(number % 5 == 3),
        seed=number,
        repetition_penalty=1.5 if number % 7 == 5 else 1.0,
        ignore_eos=number % 6 != 2 or arrives < _WAVES[-1][0],
    )
    return as_offered(adapter, Asked(prompt[:longest], sampling, arrives))


def wide_settings(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return settings that have every value of every switch, but of numbers the largest alone.

    A batch is as wide as the least of its bounds. Switches with as many values as each other come
    together in other ways the next time round.
    """
    wide = {
        name: [max(values)] if all(type(value) is int for value in values) else values
        for name, values in choices.items()
    }
    return [
        {
            name: values[(turn + at * (turn // len(values))) % len(values)]
            for at, (name, values) in enumerate(wide.items())
        }
        for turn in range(max(map(len, wide.values()), default=1))
    ]
