"""Lists the mixes of requests that are smaller than one in one way: fewer, or less in each.

The cache always has room for the largest request, which an engine may refuse otherwise.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.mix import Asked, RequestMix, Sampling
from pytest_roseinfer.search.smaller_steps import more_usual, smaller_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_roseinfer.adapters.engine import EngineAdapter


def passes_of_mixes(
    adapter: type[EngineAdapter],
) -> list[Callable[[RequestMix], Iterator[RequestMix]]]:
    """Return the ways to make a mix for this adapter smaller, the most thorough last."""
    usual = {name: values[0] for name, values in adapter.option_choices.items()}
    return [
        _without_requests,
        _with_shorter_texts,
        partial(_with_a_plainer_engine, usual, min(adapter.block_sizes)),
        _with_less_room,
        _with_simpler_requests,
        _with_all_sooner,
    ]


def _without_requests(mix: RequestMix) -> Iterator[RequestMix]:
    """Leave out requests: half of all, then fewer, from the end on."""
    asked, many = mix.requests, mix.size
    while many := many // 2:
        for end in range(mix.size, many - 1, -many):
            before, behind = asked[: end - many], asked[end:]
            yield from _with(mix, (*before, *behind))
            # What was left out may have kept them waiting.
            yield from _with(mix, (*before, *map(_a_step_later, behind)))


def _a_step_later(asked: Asked) -> Asked:
    """Have a request come later, and be cancelled soon if at all."""
    soon = None if asked.cancelled_after is None else min(1, asked.cancelled_after)
    return replace(asked, arrives=asked.arrives + 1, cancelled_after=soon)


def _with_shorter_texts(mix: RequestMix) -> Iterator[RequestMix]:
    """Cut tokens off all prompts, behind or in front, or off all that is generated."""
    longest = max(len(each.prompt) for each in mix.requests)
    for kept in smaller_numbers(longest, 1):
        yield from _with(mix, (_cut(each, kept) for each in mix.requests))
    for gone in (4, 1):
        yield from _with(mix, (_begun_later(each, gone) for each in mix.requests))
    most = max(each.sampling.max_new_tokens for each in mix.requests)
    for new in smaller_numbers(most, 1):
        yield from _with(mix, (_generating(each, new) for each in mix.requests))


def _with_a_plainer_engine(
    usual: dict[str, Any], smallest_block: int, mix: RequestMix
) -> Iterator[RequestMix]:
    yield from (replace(mix, options=options) for options in more_usual(mix.options, usual))
    for size in smaller_numbers(mix.block_size, smallest_block):
        yield replace(mix, block_size=size)


def _with_less_room(mix: RequestMix) -> Iterator[RequestMix]:
    least = _least_room(mix)
    for room in smaller_numbers(mix.cache_tokens, least):
        yield replace(mix, cache_tokens=room)


def _with_simpler_requests(mix: RequestMix) -> Iterator[RequestMix]:
    for at in reversed(range(mix.size)):
        for simpler in _simpler_requests(mix.requests[at]):
            yield from _with(mix, (*mix.requests[:at], simpler, *mix.requests[at + 1 :]))


def _with_all_sooner(mix: RequestMix) -> Iterator[RequestMix]:
    """Have all that are not there from the beginning come a step sooner."""
    sooner = (replace(each, arrives=max(0, each.arrives - 1)) for each in mix.requests)
    yield from _with(mix, sooner)


def _simpler_requests(asked: Asked) -> Iterator[Asked]:
    sampling = asked.sampling
    if type(sampling) is not Sampling:
        plain = {each.name: getattr(sampling, each.name) for each in fields(Sampling)}
        yield replace(asked, sampling=Sampling(**plain))
    for name in ("stops", "ends_early", "cancelled_after"):
        yield from _with_the_default(asked, name)
    for stop in asked.stops if len(asked.stops) > 1 else ():
        yield replace(asked, stops=(stop,))
    for each in fields(sampling):
        for plainer in _with_the_default(sampling, each.name):
            yield replace(asked, sampling=plainer)
    yield from (_cut(asked, kept) for kept in smaller_numbers(len(asked.prompt), 1))
    if len(asked.prompt) > 1:
        yield replace(asked, prompt=asked.prompt[1:])
    new = smaller_numbers(sampling.max_new_tokens, 1)
    yield from (_generating(asked, tokens) for tokens in new)
    yield from (replace(asked, arrives=step) for step in smaller_numbers(asked.arrives, 0))
    for step in smaller_numbers(asked.cancelled_after or 0, 0):
        yield replace(asked, cancelled_after=step)


def _with_the_default(case: Any, name: str) -> Iterator[Any]:
    (default,) = (each.default for each in fields(case) if each.name == name)
    if getattr(case, name) != default:
        yield replace(case, **{name: default})


def _with(mix: RequestMix, asked: Iterable[Asked]) -> Iterator[RequestMix]:
    """Return a mix with other requests: in as large a cache, and in one smaller by what is gone."""
    smaller = replace(mix, requests=tuple(asked))
    yield smaller
    if gone := _tokens(mix) - _tokens(smaller):
        room = max(_least_room(smaller), mix.cache_tokens - gone)
        yield replace(smaller, cache_tokens=room)


def _tokens(mix: RequestMix) -> int:
    return sum(each.most_tokens for each in mix.requests)


def _least_room(mix: RequestMix) -> int:
    return max(each.most_tokens for each in mix.requests)


def _cut(asked: Asked, kept: int) -> Asked:
    return replace(asked, prompt=asked.prompt[:kept])


def _begun_later(asked: Asked, gone: int) -> Asked:
    return replace(asked, prompt=asked.prompt[gone:] or asked.prompt[-1:])


def _generating(asked: Asked, tokens: int) -> Asked:
    fewer = min(tokens, asked.sampling.max_new_tokens)
    return replace(asked, sampling=replace(asked.sampling, max_new_tokens=fewer))
