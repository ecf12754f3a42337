"""Strategies that draw mixes of requests, and the fixed wide mixes for every engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec, Sampling
from pytest_roseinfer.engine_capabilities.capability import (
    change,
    for_adapter,
    offered_capabilities,
)
from pytest_roseinfer.engine_capabilities.guides import draw_guides
from pytest_roseinfer.engine_capabilities.lifecycle import draw_cancel_after
from pytest_roseinfer.engine_capabilities.long_contexts import draw_long_length, draw_long_path
from pytest_roseinfer.engine_capabilities.sampling import HOTTEST, draw_parameters
from pytest_roseinfer.engines.sensitivity import is_blind
from pytest_roseinfer.histories.strategies import switches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.adapters.engine import EngineAdapter

__all__ = ["large_mixes", "prompts", "request_mixes", "samplings"]

# Prompts.


def common_text(length: int, vocabulary: int, branch: int = 0) -> tuple[int, ...]:
    """Return the first tokens of a fixed pseudo-random text."""
    return tuple((at * at * 7 + at * 3 + branch * 11 + 5) % vocabulary for at in range(length))


# Parameters that an engine supports.


def draw_capability_fields(
    draw: st.DrawFn, adapter: type[EngineAdapter], spec: RequestSpec
) -> RequestSpec:
    """Draw a request's optional parameters from the capabilities of an adapter class.

    Where tokens would show too little, each request gets logprobs, which show more.
    """
    spec = for_adapter(adapter, spec)
    for capability in offered_capabilities(adapter):
        if capability.draw:
            spec = capability.draw(draw, adapter, spec)
    if adapter.defines("logprobs") and is_blind(adapter):
        spec = change(spec, logprobs=True)
    return for_adapter_only(adapter, spec)


def for_adapter_only(adapter: type[EngineAdapter], spec: RequestSpec) -> RequestSpec:
    """Return a request with an adapter class's fields, unsupported parameters removed."""
    spec = for_adapter(adapter, spec)
    for capability in adapter.capabilities:
        if capability.restrict:
            spec = capability.restrict(adapter, spec)
    return spec


# Drawn mixes.


_LARGER_BLOCK_SIZES = (8, 4, 8, 3)
"""Block sizes for mixes with early ends; a write past a request's end fits into the last block."""
_MAX_REQUESTS = 6
_KINDS = (
    *("crowded", "uneven", "continued", "ended") * 2,
    *("repeated", "anyhow", "relay", "repeated"),
)


def _kinds(adapter: type[EngineAdapter], aim: str | None, first_setting: int) -> Sequence[str]:
    """Return the kinds of mixes; the simplest repeats prompts if the aim is only to find these."""
    settings = adapter.paths[aim].settings_to_draw if aim else ()
    enabled_by = adapter.prefix_reuse.enabled_by
    finds = enabled_by and settings and settings[first_setting % len(settings)] == enabled_by
    return ("repeated", *_KINDS) if finds else _KINDS


@st.composite
def prompts(
    draw: st.DrawFn, *, vocabulary: int, longest: int, length: str = "any"
) -> tuple[int, ...]:
    """Draw a prompt: a prefix of the common text, then of one of four others.

    ``length`` is ``short``, ``long`` or ``any``. A few prompts differ from the others in their
    first token alone.
    """
    short, long = st.integers(0, 2), st.integers(longest // 3, longest)
    shared = draw({"short": short, "long": long, "any": st.one_of(short, long)}[length])
    num_own = draw(st.integers(0 if shared else 1, min(2, longest - shared) or 1))
    branch = draw(st.integers(1, 4))
    begins = (branch % vocabulary,) if draw(st.sampled_from((False, False, True))) else ()
    common = begins + common_text(shared, vocabulary)[len(begins) :]
    return (common + common_text(num_own, vocabulary, branch))[:longest]


@st.composite
def samplings(draw: st.DrawFn, *, max_tokens: int) -> Sampling:
    """Draw the parameters of a request for at most ``max_tokens`` tokens."""
    return Sampling(**draw_parameters(draw, max_tokens))


@st.composite
def request_mixes(
    draw: st.DrawFn,
    adapter: type[EngineAdapter],
    *,
    max_steps: int = 12,
    device: str = "cpu",
    aim: str | None = None,
    first_setting: int = 0,
    preludes: Sequence[RequestMix] = (),
) -> RequestMix:
    """Draw a small engine, and requests that share prefixes, fill its cache, and come and go.

    Of twelve mixes:

    - four start short and long prompts in turn, all at once; two of these run to their last token
      in a cache with hardly more blocks than the largest request needs, as the simplest mix does;
    - two are a prompt and its continuation, in a cache with room for just that;
    - in two, requests end early while another one waits;
    - two repeat prompts after their ends, one is a relay, and one is arbitrary.

    With ``aim``, the engine has the switches that the path needs, the simplest mix those with the
    index ``first_setting``; half of the mixes then exceed the path's limit in ``long_contexts``, if
    it has one. With ``preludes``, two in three mixes are one of them with one more request.
    """
    new = min(max_steps, adapter.max_tokens // 3)
    longest = adapter.max_tokens - new
    begins = st.one_of(st.none(), *[st.sampled_from(preludes)] * 2) if preludes else st.none()
    if prelude := draw(begins):
        return _with_one_more(draw, adapter, prelude, longest, new)
    if path := draw_long_path(draw, adapter, aim, device):
        first = first_setting if path == aim else 0
        return _with_long_context(draw, adapter, path, first, new, device)
    kind = draw(st.sampled_from(_kinds(adapter, aim, first_setting)))
    if kind == "continued":
        specs = _continued(draw, adapter.vocabulary, longest, new)
    elif kind == "relay":
        specs = _relay(draw, adapter.vocabulary, longest, new)
    elif kind == "ended":
        specs = _ended_early(draw, adapter.vocabulary, longest, new)
    elif kind == "repeated":
        specs = _repeated(draw, adapter, longest, new)
    else:
        specs = _crowd(draw, adapter.vocabulary, longest, new, kind)
    specs = [draw_capability_fields(draw, adapter, each) for each in specs]
    specs = draw_guides(draw, adapter, specs)
    if kind == "repeated":
        # Engines compute a prompt again for its log-probabilities, whether or not it is stored.
        specs[-1] = change(specs[-1], prompt_logprobs=False)
    larger = [size for size in _LARGER_BLOCK_SIZES if size in adapter.block_sizes]
    roomy = kind == "ended" and larger
    block_size = draw(st.sampled_from(larger if roomy else adapter.block_sizes))
    sizes = [each.max_tokens for each in specs]
    room = max(sizes)
    if kind == "relay":
        room = sum(sizes) + block_size * len(sizes)
    elif kind == "ended":
        # The last request must wait for those that end early.
        room = max(sizes[-1], sum(sizes[:-1])) + block_size
    elif kind == "repeated":
        room = draw(st.sampled_from(_rooms_for_repeated(specs, block_size)))
    elif kind != "continued":
        more = [0, 1, block_size, 3 * block_size] + [sum(sizes)] * (kind != "crowded")
        room += draw(st.sampled_from(more))
    options = draw(switches(adapter, aim, first_setting))
    if kind == "repeated":
        options = {**options, **_settings_of_repeated(draw, adapter, specs)}
    return RequestMix(tuple(specs), block_size, room, device, options)


def _with_one_more(
    draw: st.DrawFn, adapter: type[EngineAdapter], mix: RequestMix, longest: int, new: int
) -> RequestMix:
    prompt = draw(prompts(vocabulary=adapter.vocabulary, longest=longest))
    drawn = RequestSpec(prompt, draw(samplings(max_tokens=new)), arrival=draw(st.integers(0, new)))
    spec = draw_capability_fields(draw, adapter, drawn)
    room = max(mix.cache_tokens, spec.max_tokens)
    # A prelude may be such an extended mix itself.
    return replace(mix, requests=(*mix.requests[:_MAX_REQUESTS], spec), cache_tokens=room)


def _with_long_context(
    draw: st.DrawFn, adapter: type[EngineAdapter], path: str, first: int, new: int, device: str
) -> RequestMix:
    """Draw a request with a long context for a path, and a short one that decodes with it."""
    lengths = (draw_long_length(draw, adapter, path), draw(st.integers(1, adapter.max_tokens // 4)))
    specs = []
    for at, length in enumerate(lengths):
        heat = draw(st.sampled_from((0.0, 3.0)))
        sampling = Sampling(min(new, 3), temperature=heat, seed=at, ignore_eos=True)
        spec = RequestSpec(common_text(length, adapter.vocabulary, at), sampling)
        spec = draw_capability_fields(draw, adapter, spec)
        # Each token of a prompt with logprobs takes a forward pass of the slow twin.
        specs.append(change(spec, prompt_logprobs=False))
    block_size = draw(st.sampled_from(adapter.block_sizes))
    room = sum(each.max_tokens + block_size for each in specs)
    return RequestMix(tuple(specs), block_size, room, device, draw(switches(adapter, path, first)))


def _crowd(
    draw: st.DrawFn, vocabulary: int, longest: int, new: int, kind: str
) -> list[RequestSpec]:
    if kind == "anyhow":
        lengths = ["any"] * draw(st.integers(1, _MAX_REQUESTS))
    else:
        lengths = (["short", "long"] * _MAX_REQUESTS)[: draw(st.integers(4, _MAX_REQUESTS))]
    specs = []
    arrival = 0
    for length in lengths:
        if kind == "anyhow":
            arrival += draw(st.sampled_from((0, 0, 1, 2, 5)))
        sampling = draw(samplings(max_tokens=new))
        if kind == "crowded":
            sampling = replace(sampling, ignore_eos=True, max_new_tokens=new)
        prompt = draw(prompts(vocabulary=vocabulary, longest=longest, length=length))
        cancel_after = draw_cancel_after(draw)
        specs.append(RequestSpec(prompt, sampling, arrival, cancel_after=cancel_after))
    return specs


def _relay(draw: st.DrawFn, vocabulary: int, longest: int, new: int) -> list[RequestSpec]:
    """Draw two long requests, short ones between them, and later long ones.

    The later requests take over rows and blocks of the short ones while their neighbours go on.
    """
    soon = min(new, draw(st.integers(2, 3)))
    ends = [new, *[soon] * draw(st.integers(1, 2)), new]
    lengths, heats = st.integers(1, max(1, longest // 4)), st.sampled_from((0.0, 0.0, 3.0))
    specs = [
        RequestSpec(
            common_text(draw(lengths), vocabulary, at),
            Sampling(tokens, temperature=draw(heats), seed=at, ignore_eos=True),
        )
        for at, tokens in enumerate(ends)
    ]
    arrival = soon
    for at in range(draw(st.integers(2, min(3, _MAX_REQUESTS - len(ends))))):
        arrival += draw(st.integers(0, 2))
        length = draw(st.integers(max(1, longest // 3), longest))
        text = common_text(length, vocabulary, len(specs))
        lasts = Sampling(new, temperature=draw(heats), seed=at, ignore_eos=True)
        if draw(st.sampled_from((False, False, False, True))):
            lasts = replace(draw(samplings(max_tokens=new)), max_new_tokens=new)
        specs.append(RequestSpec(text, lasts, arrival))
    return specs


def _ended_early(draw: st.DrawFn, vocabulary: int, longest: int, new: int) -> list[RequestSpec]:
    """Draw one or two requests that the model ends early, a longer one, and a late one.

    Some of the first end at their first token.

    The late one has a long prompt, and mostly a penalty, since many engines decode such requests
    separately. It takes the blocks of those that ended while their neighbour goes on.
    """
    short = st.integers(1, max(1, longest // 4))
    specs = []
    for at in range(draw(st.integers(1, 2))):
        first = draw(st.sampled_from((False, False, True)))
        # As the only token allowed, it ends the text for two reasons.
        tokens = draw(st.sampled_from((1, new))) if first else new
        heat = HOTTEST if first else 3.0
        sampling = Sampling(tokens, temperature=heat, seed=draw(st.integers(0, 20)))
        text = common_text(draw(short), vocabulary, at)
        specs.append(RequestSpec(text, sampling, ends_early=not first, ends_first=first))
    lasting = common_text(draw(short), vocabulary, len(specs))
    specs.append(RequestSpec(lasting, Sampling(new, ignore_eos=True)))
    late = common_text(draw(st.integers(max(1, longest // 2), longest)), vocabulary, len(specs))
    penalty = draw(st.sampled_from((1.5, 1.5, 1.0)))
    sampling = Sampling(new, repetition_penalty=penalty, ignore_eos=True)
    return [*specs, RequestSpec(late, sampling, arrival=draw(st.integers(1, max(1, new // 2))))]


def _continued(draw: st.DrawFn, vocabulary: int, longest: int, new: int) -> list[RequestSpec]:
    """Draw a prompt that gets one token, and a longer prompt that starts with all of it.

    Sometimes the first is cancelled early, so that only a part of the prompt is stored.
    """
    stored = draw(st.integers(1, longest - 2))
    more = draw(st.integers(1, 2))
    cancel_after = draw(st.sampled_from((None, 1, 2)))
    return [
        RequestSpec(common_text(stored, vocabulary), Sampling(), cancel_after=cancel_after),
        RequestSpec(common_text(stored + more, vocabulary), draw(samplings(max_tokens=new))),
    ]


def _repeated(
    draw: st.DrawFn, adapter: type[EngineAdapter], longest: int, new: int
) -> list[RequestSpec]:
    """Draw requests one after the other: short prompts, a long one, and one of them again.

    In a cache without room for all of them, the long one must be evicted for the second short one,
    since the first was used after it. If an engine evicts texts from their ends, and the long one
    comes again, its first blocks must be found.
    """
    finds_first_blocks = adapter.prefix_reuse.evicts_from_end is not None
    ends_with_long = finds_first_blocks and draw(st.sampled_from((True, False)))
    parts = (4, 3) if ends_with_long else (6, 4)
    short = st.integers(*(max(1, longest // part) for part in parts))
    lengths = [longest, draw(short), draw(short)]
    long, again, other = (
        common_text(length, adapter.vocabulary, at) for at, length in enumerate(lengths)
    )
    arrival = 0
    specs = []
    begins = draw(st.sampled_from(((long, again), (again, long, again))))
    for text in (*begins, other, long if ends_with_long else again):
        tokens = draw(st.sampled_from((1, 1, 2, 3)))
        sampling = Sampling(min(tokens, new), ignore_eos=draw(st.booleans()))
        specs.append(RequestSpec(text, sampling, arrival))
        # Chunks of a prompt may have a single token.
        arrival += len(text) + tokens + adapter.extra_steps
    return specs


def _ends_with_longest(specs: Sequence[RequestSpec]) -> bool:
    return len(specs[-1].prompt) == max(len(each.prompt) for each in specs)


def _settings_of_repeated(
    draw: st.DrawFn, adapter: type[EngineAdapter], specs: Sequence[RequestSpec]
) -> dict[str, Any]:
    """Draw the switches with which the last request must find its prompt, or a part of it."""
    reuse = adapter.prefix_reuse
    settings = dict(reuse.enabled_by)
    if _ends_with_longest(specs):
        for name, values in (reuse.evicts_from_end or {}).items():
            usual = [each for each in adapter.option_choices[name] if each in values]
            settings[name] = draw(st.sampled_from(usual))
    return settings


def _rooms_for_repeated(specs: Sequence[RequestSpec], block_size: int) -> list[int]:
    """Return the room for the last three requests, with an eighth to spare, and for all of them.

    If the last one is the longest, it is the room for that one, so that a part of it is evicted.
    """
    blocks = [-(-each.max_tokens // block_size) + 1 for each in specs]
    needed = (sum(blocks[-3:]), sum(blocks[-3:]), sum(blocks))
    rooms = [(each * 8 // 7 + 1) * block_size for each in needed]
    if _ends_with_longest(specs):
        rooms = [blocks[-1] * 8 // 7 * block_size]
    return [max(room, *(each.max_tokens for each in specs)) for room in rooms]


_LARGE_BLOCKS = (1, 3, 16, 64, 2, 256)
_LENGTHS = (1, 5, 40, 64, 65, 255, 257, 600, 1200)
_MAX_PROMPT_TOKENS = 20_000
"""Maximum prompt tokens of all requests of a mix together."""
_MAX_OUTPUT_TOKENS = 120
"""Maximum output tokens of all requests of a mix together; alone, each takes a forward pass."""


@st.composite
def large_mixes(
    draw: st.DrawFn, adapter: type[EngineAdapter], *, device: str = "cpu", few: int | None = None
) -> RequestMix:
    """Draw engines and requests of any size.

    Blocks have 1 to 256 tokens, prompts 1 to 1,200, mixes 1 to 100 requests, and pools have just
    enough room for the largest request, or up to enough for all at once. Sizes are around the
    limits where buffers start, grow and are abandoned. ``few`` limits the values of each of the
    engine's switches, so that few kernels are compiled.
    """
    crowd = draw(st.sampled_from((1, 2, 5, 20, 100)))
    new = min(8, max(1, _MAX_OUTPUT_TOKENS // crowd))
    longest = min(adapter.large_mix_tokens - new, _MAX_PROMPT_TOKENS // crowd)
    lengths = st.sampled_from([length for length in _LENGTHS if length <= longest])
    drawn = [
        RequestSpec(
            common_text(draw(lengths), adapter.vocabulary, draw(st.sampled_from((0, 0, at)))),
            draw(samplings(max_tokens=new)),
            arrival=draw(st.sampled_from((0, 0, 0, 1, 4))),
        )
        for at in range(crowd)
    ]
    specs = tuple(for_adapter_only(adapter, each) for each in drawn)
    options = {name: values[0] for name, values in adapter.option_choices.items()}
    for name, values in adapter.sizes.items():
        options[name] = draw(st.sampled_from(values[:few]))
    needed = [each.max_tokens for each in specs]
    block_size = draw(st.sampled_from(_LARGE_BLOCKS[:few]))
    room = max(needed) + draw(st.sampled_from((0, 1, sum(needed) // 2, sum(needed))))
    return RequestMix(specs, block_size, room, device, options)


# Wide mixes: many requests at a time.
#
# Drawn mixes are narrow, because many narrow mixes find more than few wide ones. But some code only
# runs for the later rows of a wide batch.


_WAVES = ((0, 9, 16), (2, 8, 14), (4, 18, 9))
"""Waves of requests: arrival step, number of requests, and maximum tokens of each.

9, 17 and 35 run at a time: at least one more than the rows a kernel program often takes.
"""
REQUESTS = sum(many for _, many, _ in _WAVES)
_LONGEST = 11


def wide_mix(adapter: type[EngineAdapter], options: Mapping[str, Any], device: str) -> RequestMix:
    """Return requests of mixed lengths for an engine with these switches and room for all.

    Every fourth continues the previous request's prompt, and some are sampled or have a penalty.
    They end one by one, so that later rows move up.
    """
    specs: list[RequestSpec] = []
    for arrival, many, tokens in _WAVES:
        for _ in range(many):
            specs.append(_request(adapter, len(specs), arrival, tokens, specs))
    specs = specs[: adapter.max_requests]
    size = min(adapter.block_sizes, key=lambda each: abs(each - 4))
    room = sum(each.max_tokens + size for each in specs)
    return RequestMix(tuple(specs), size, room, device, options)


def _request(
    adapter: type[EngineAdapter], number: int, arrival: int, tokens: int, before: list[RequestSpec]
) -> RequestSpec:
    new = min(tokens - number % 3, adapter.max_tokens // 3)
    longest = adapter.max_tokens - new
    prompt = common_text(1 + number * 5 % _LONGEST, adapter.vocabulary, number)
    if number % 4 == 1:
        prompt = before[-1].prompt + prompt
    sampling = Sampling(
        new,
        temperature=float(number % 5 == 3),
        seed=number,
        repetition_penalty=1.5 if number % 7 == 5 else 1.0,
        ignore_eos=number % 6 != 2 or arrival < _WAVES[-1][0],
    )
    return for_adapter_only(adapter, RequestSpec(prompt[:longest], sampling, arrival))


def wide_settings(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return settings that cover every value of each switch, and only the largest of numbers.

    Numbers bound the width of a batch, so smaller ones would narrow it. Switches with equally
    many values are combined differently in each round.
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
