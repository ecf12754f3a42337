"""Hypothesis strategies for mixes of requests.

Prompts are never drawn token by token: each begins with a part of a common text and goes on in
one of a few ways, so that prefixes meet at every length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from pytest_roseinfer.adapters.mix import Asked, RequestMix, Sampling
from pytest_roseinfer.cases.strategies import switches
from pytest_roseinfer.engines.common_text import common_text
from pytest_roseinfer.engines.offered import as_offered
from pytest_roseinfer.engines.wishes import HOTTEST, wishing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.engine import EngineAdapter

_LARGER_BLOCK_SIZES = (8, 4, 8, 3)
"""What still writes behind the end of a request has room to do so in the last of these."""
_MOST_REQUESTS = 6
_KINDS = (*("crowded", "uneven", "continued", "ended") * 2, "crowded", "anyhow", "relay")


@st.composite
def prompts(
    draw: st.DrawFn, *, vocabulary: int, longest: int, length: str = "any"
) -> tuple[int, ...]:
    """Some of the common text, then some of one of four others; ``short``, ``long`` or any.

    A few differ from the others in their first token alone, and agree from there on.
    """
    short, long = st.integers(0, 2), st.integers(longest // 3, longest)
    shared = draw({"short": short, "long": long, "any": st.one_of(short, long)}[length])
    own = draw(st.integers(0 if shared else 1, min(2, longest - shared) or 1))
    branch = draw(st.integers(1, 4))
    begins = (branch % vocabulary,) if draw(st.sampled_from((False, False, True))) else ()
    common = begins + common_text(shared, vocabulary)[len(begins) :]
    return (common + common_text(own, vocabulary, branch))[:longest]


_LIKELIEST_ONLY = ((0, 1.0), (1, 1.0), (5, 1.0), (5, 0.8), (0, 0.8))
"""Pairs of top_k and top_p."""


@st.composite
def samplings(draw: st.DrawFn, *, most: int) -> Sampling:
    temperature = draw(st.sampled_from((0.0, 0.0, 1.0, 3.0, HOTTEST)))
    top_k, top_p = draw(st.sampled_from(_LIKELIEST_ONLY)) if temperature < HOTTEST else (0, 1.0)
    return Sampling(
        # With one new token, the blocks of the prompt alone are left behind.
        max_new_tokens=draw(st.one_of(st.just(1), st.integers(1, most))),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=draw(st.sampled_from((1.0, 1.0, 1.5, 4.0))),
        seed=draw(st.integers(0, 3)),
        ignore_eos=draw(st.booleans()),
    )


@st.composite
def request_mixes(
    draw: st.DrawFn,
    adapter: type[EngineAdapter],
    *,
    most_steps: int = 12,
    device: str = "cpu",
    aim: str | None = None,
    preludes: Sequence[RequestMix] = (),
) -> RequestMix:
    """A small engine and requests that share prefixes, crowd its cache and come and go.

    Five in eleven begin with short and long prompts in turn, all at once. Of these, three crowd
    the cache for certain: they run to their last token, and there are hardly more blocks than the
    largest takes. Two are a prompt and its continuation, in a cache that holds no more than that;
    two end early before another that waits, one is a relay, and one comes anyhow. With ``aim``,
    the engine has the switches that path needs. Given ``preludes``, two in three are one of them
    with one request more.
    """
    new = min(most_steps, adapter.most_tokens // 3)
    longest = adapter.most_tokens - new
    begins = st.one_of(st.none(), *[st.sampled_from(preludes)] * 2) if preludes else st.none()
    if prelude := draw(begins):
        return _with_one_more(draw, adapter, prelude, longest, new)
    kind = draw(st.sampled_from(_KINDS))
    if kind == "continued":
        asked = _continued(draw, adapter.vocabulary, longest, new)
    elif kind == "relay":
        asked = _relay(draw, adapter.vocabulary, longest, new)
    elif kind == "ended":
        asked = _ended_early(draw, adapter.vocabulary, longest, new)
    else:
        asked = _crowd(draw, adapter.vocabulary, longest, new, kind)
    asked = [as_offered(adapter, wishing(draw, adapter, each)) for each in asked]
    larger = [size for size in _LARGER_BLOCK_SIZES if size in adapter.block_sizes]
    roomy = kind == "ended" and larger
    block_size = draw(st.sampled_from(larger if roomy else adapter.block_sizes))
    sizes = [each.most_tokens for each in asked]
    room = max(sizes)
    if kind == "relay":
        room = sum(sizes) + block_size * len(sizes)
    elif kind == "ended":
        # The last one must wait for those that end early.
        room = max(sizes[-1], sum(sizes[:-1])) + block_size
    elif kind != "continued":
        more = [0, 1, block_size, 3 * block_size] + [sum(sizes)] * (kind != "crowded")
        room += draw(st.sampled_from(more))
    return RequestMix(tuple(asked), block_size, room, device, draw(switches(adapter, aim)))


def _with_one_more(
    draw: st.DrawFn, adapter: type[EngineAdapter], mix: RequestMix, longest: int, new: int
) -> RequestMix:
    prompt = draw(prompts(vocabulary=adapter.vocabulary, longest=longest))
    drawn = Asked(prompt, draw(samplings(most=new)), arrives=draw(st.integers(0, new)))
    asked = as_offered(adapter, wishing(draw, adapter, drawn))
    room = max(mix.cache_tokens, asked.most_tokens)
    # What reached something may be such a mix itself.
    return replace(mix, requests=(*mix.requests[:_MOST_REQUESTS], asked), cache_tokens=room)


def _crowd(draw: st.DrawFn, vocabulary: int, longest: int, new: int, kind: str) -> list[Asked]:
    if kind == "anyhow":
        lengths = ["any"] * draw(st.integers(1, _MOST_REQUESTS))
    else:
        lengths = (["short", "long"] * _MOST_REQUESTS)[: draw(st.integers(4, _MOST_REQUESTS))]
    asked = []
    arrives = 0
    for length in lengths:
        if kind == "anyhow":
            arrives += draw(st.sampled_from((0, 0, 1, 2, 5)))
        sampling = draw(samplings(most=new))
        if kind == "crowded":
            sampling = replace(sampling, ignore_eos=True, max_new_tokens=new)
        prompt = draw(prompts(vocabulary=vocabulary, longest=longest, length=length))
        cancelled = draw(st.sampled_from((None, None, None, None, 0, 1, 2, 4, 8)))
        asked.append(Asked(prompt, sampling, arrives, cancelled))
    return asked


def _relay(draw: st.DrawFn, vocabulary: int, longest: int, new: int) -> list[Asked]:
    """Two requests last, some between them end soon, and others come after those and last.

    A new request takes over what belonged to one that ended, while its neighbours still go on.
    """
    soon = min(new, draw(st.integers(2, 3)))
    ends = [new, *[soon] * draw(st.integers(1, 2)), new]
    lengths, heats = st.integers(1, max(1, longest // 4)), st.sampled_from((0.0, 0.0, 3.0))
    asked = [
        Asked(
            common_text(draw(lengths), vocabulary, at),
            Sampling(tokens, temperature=draw(heats), seed=at, ignore_eos=True),
        )
        for at, tokens in enumerate(ends)
    ]
    arrives = soon
    for at in range(draw(st.integers(2, min(3, _MOST_REQUESTS - len(ends))))):
        arrives += draw(st.integers(0, 2))
        length = draw(st.integers(max(1, longest // 3), longest))
        text = common_text(length, vocabulary, len(asked))
        lasts = Sampling(new, temperature=draw(heats), seed=at, ignore_eos=True)
        if draw(st.sampled_from((False, False, False, True))):
            lasts = replace(draw(samplings(most=new)), max_new_tokens=new)
        asked.append(Asked(text, lasts, arrives))
    return asked


def _ended_early(draw: st.DrawFn, vocabulary: int, longest: int, new: int) -> list[Asked]:
    """The model ends one or two texts early. Another, begun after them, lasts.

    Then comes a long prompt with a penalty, which many engines decode apart from the others. It
    takes the blocks of those that ended while their neighbour goes on.
    """
    short = st.integers(1, max(1, longest // 4))
    asked = []
    for at in range(draw(st.integers(1, 2))):
        sampling = Sampling(new, temperature=3.0, seed=draw(st.integers(0, 20)))
        asked.append(Asked(common_text(draw(short), vocabulary, at), sampling, ends_early=True))
    lasting = common_text(draw(short), vocabulary, len(asked))
    asked.append(Asked(lasting, Sampling(new, ignore_eos=True)))
    late = common_text(draw(st.integers(max(1, longest // 2), longest)), vocabulary, len(asked))
    penalty = draw(st.sampled_from((1.5, 1.5, 1.0)))
    sampling = Sampling(new, repetition_penalty=penalty, ignore_eos=True)
    return [*asked, Asked(late, sampling, arrives=draw(st.integers(1, max(1, new // 2))))]


def _continued(draw: st.DrawFn, vocabulary: int, longest: int, new: int) -> list[Asked]:
    """A prompt gets one token, and a longer prompt begins with all that was stored of it.

    Some are cancelled before that: what is stored then is a part of the prompt.
    """
    stored = draw(st.integers(1, longest - 2))
    more = draw(st.integers(1, 2))
    cancelled = draw(st.sampled_from((None, 1, 2)))
    return [
        Asked(common_text(stored, vocabulary), Sampling(), cancelled_after=cancelled),
        Asked(common_text(stored + more, vocabulary), draw(samplings(most=new))),
    ]


_LARGE_BLOCKS = (1, 3, 16, 64, 2, 256)
_LENGTHS = (1, 5, 40, 64, 65, 255, 257, 600, 1200)
_MOST_PROMPTED = 20_000
"""All prompts of a mix have no more tokens together."""
_MOST_GENERATED = 120
"""All requests of a mix get no more tokens; alone, each token takes a forward pass."""


@st.composite
def large_mixes(
    draw: st.DrawFn, adapter: type[EngineAdapter], *, device: str = "cpu", few: int | None = None
) -> RequestMix:
    """Engines and requests of any size: blocks of one token to 256, prompts of one to 1,200, one
    request to a hundred, a pool that hardly takes the largest of them or all at once.

    Sizes lie around those that buffers begin with, grow to and are given up at. With ``few``,
    only so many of each of the engine's switches are drawn, so that few kernels are compiled.
    """
    crowd = draw(st.sampled_from((1, 2, 5, 20, 100)))
    new = min(8, max(1, _MOST_GENERATED // crowd))
    longest = min(adapter.longest - new, _MOST_PROMPTED // crowd)
    lengths = st.sampled_from([length for length in _LENGTHS if length <= longest])
    drawn = [
        Asked(
            common_text(draw(lengths), adapter.vocabulary, draw(st.sampled_from((0, 0, at)))),
            draw(samplings(most=new)),
            arrives=draw(st.sampled_from((0, 0, 0, 1, 4))),
        )
        for at in range(crowd)
    ]
    asked = tuple(as_offered(adapter, each) for each in drawn)
    options = {name: values[0] for name, values in adapter.option_choices.items()}
    for name, values in adapter.sizes.items():
        options[name] = draw(st.sampled_from(values[:few]))
    needed = [each.most_tokens for each in asked]
    block_size = draw(st.sampled_from(_LARGE_BLOCKS[:few]))
    room = max(needed) + draw(st.sampled_from((0, 1, sum(needed) // 2, sum(needed))))
    return RequestMix(asked, block_size, room, device, options)
