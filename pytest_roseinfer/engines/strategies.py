"""Hypothesis strategies for mixes of requests.

Prompts are never drawn token by token: they begin with a common text, of which each takes
a part, and go on in a few different ways, so that prefixes meet at every length.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from pytest_roseinfer.cases.strategies import switches
from pytest_roseinfer.engines.mix import Asked, RequestMix, Sampling

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.engine import EngineAdapter

BLOCK_SIZES = (4, 1, 2, 3, 8)
_MOST_REQUESTS = 6
_TEMPERATURES = (0.0, 0.0, 1.0, 3.0)


def common_text(length: int, vocabulary: int, branch: int = 0) -> tuple[int, ...]:
    """Tokens that look like any others and are the same every time."""
    return tuple((at * at * 7 + at * 3 + branch * 11 + 5) % vocabulary for at in range(length))


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


@st.composite
def samplings(draw: st.DrawFn, *, most: int) -> Sampling:
    return Sampling(
        # With one new token, the blocks of the prompt alone are left behind.
        max_new_tokens=draw(st.one_of(st.just(1), st.integers(1, most))),
        temperature=draw(st.sampled_from(_TEMPERATURES)),
        top_k=draw(st.sampled_from((0, 1, 5))),
        top_p=draw(st.sampled_from((1.0, 0.8))),
        repetition_penalty=draw(st.sampled_from((1.0, 1.0, 1.5))),
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
) -> RequestMix:
    """A small engine and requests that share prefixes, crowd its cache and come and go.

    Two thirds of them begin with short and long prompts in turn, all at once. Of these, half
    crowd the cache for certain: they run to their last token, and there are hardly more blocks
    than the largest takes. A few are a prompt and its continuation, in a cache that holds no
    more than that; as many are a relay. With ``aim``, the engine has the switches that path needs.
    """
    new = min(most_steps, adapter.most_tokens // 3)
    longest = adapter.most_tokens - new
    kind = draw(st.sampled_from((*("uneven", "crowded") * 2, "anyhow", "continued", "relay")))
    if kind == "continued":
        return draw(_continued(adapter, longest, new, device, aim))
    if kind == "relay":
        return draw(_relay(adapter, longest, new, device, aim))
    if kind == "anyhow":
        lengths = ["any"] * draw(st.integers(1, _MOST_REQUESTS))
    else:
        lengths = (["short", "long"] * _MOST_REQUESTS)[: draw(st.integers(4, _MOST_REQUESTS))]
    asked: list[Asked] = []
    arrives = 0
    for length in lengths:
        if kind == "anyhow":
            arrives += draw(st.sampled_from((0, 0, 1, 2, 5)))
        sampling = draw(samplings(most=new))
        if kind == "crowded":
            sampling = replace(sampling, ignore_eos=True, max_new_tokens=new)
        prompt = draw(prompts(vocabulary=adapter.vocabulary, longest=longest, length=length))
        cancelled = draw(st.sampled_from((None, None, None, None, 0, 1, 2, 4)))
        asked.append(Asked(prompt, sampling, arrives, cancelled))
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    sizes = [len(each.prompt) + each.sampling.max_new_tokens for each in asked]
    more = [0, 1, block_size, 3 * block_size]
    room = max(sizes) + draw(st.sampled_from(more if kind == "crowded" else [*more, sum(sizes)]))
    return RequestMix(tuple(asked), block_size, room, device, draw(switches(adapter, aim)))


@st.composite
def _relay(
    draw: st.DrawFn,
    adapter: type[EngineAdapter],
    longest: int,
    new: int,
    device: str,
    aim: str | None,
) -> RequestMix:
    """Two requests that last, and between them some that end soon; others come after those.

    What belongs to one that ended is the next one's, while its neighbours still go on.
    """
    lasting = Sampling(new, ignore_eos=True)
    soon = min(new, draw(st.integers(2, 3)))
    between = [Sampling(soon, ignore_eos=True)] * draw(st.integers(1, 3))
    ends = [lasting, *between, lasting]
    lengths = st.integers(1, max(1, longest // 4))
    asked = [
        Asked(common_text(draw(lengths), adapter.vocabulary, at), sampling)
        for at, sampling in enumerate(ends)
    ]
    arrives = soon
    for at in range(draw(st.integers(1, min(2, _MOST_REQUESTS - len(ends))))):
        arrives += draw(st.integers(0, 2))
        length = draw(st.integers(max(1, longest // 3), longest))
        text = common_text(length, adapter.vocabulary, len(ends) + at)
        asked.append(Asked(text, draw(samplings(most=new)), arrives))
    sizes = [len(each.prompt) + each.sampling.max_new_tokens for each in asked]
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    room = sum(sizes) + block_size * len(sizes)
    return RequestMix(tuple(asked), block_size, room, device, draw(switches(adapter, aim)))


@st.composite
def _continued(
    draw: st.DrawFn,
    adapter: type[EngineAdapter],
    longest: int,
    new: int,
    device: str,
    aim: str | None,
) -> RequestMix:
    """A prompt, one token, and a longer prompt that begins with all that was stored of it."""
    stored = draw(st.integers(1, longest - 2))
    more = draw(st.integers(1, 2))
    asked = (
        Asked(common_text(stored, adapter.vocabulary), Sampling()),
        Asked(common_text(stored + more, adapter.vocabulary), draw(samplings(most=new))),
    )
    room = stored + more + asked[1].sampling.max_new_tokens
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    return RequestMix(asked, block_size, room, device, draw(switches(adapter, aim)))
