"""Pictures of defects found by reading: examples written by hand, on which the harness fails."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer import CacheSpec, History, KVCacheAdapter, RequestSpec, Sampling
from pytest_roseinfer.capabilities.disaggregation import (
    BeginReceive,
    FinishReceive,
    MakeRemote,
    RemotePrefill,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.writes import Prefill
from pytest_roseinfer.oracle.texts import WHOLE
from pytest_roseinfer.targets.nano_vllm_engine import NanoVllmEngine
from pytest_roseinfer.targets.sglang_radix import SglangAdapter, new_request
from pytest_roseinfer.targets.transformers_engine import TransformersEngine
from pytest_roseinfer.targets.vllm_nixl import CachingNixlVllmAdapter
from tests.others import transformers_variants as variants
from tests.others.mini_sglang import HasRowsOf32, TakesThreeTokens
from tests.others.picture import Picture, mix_of
from tests.others.tokasaurus_engine import PromisesRecency

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import EngineAdapter, RequestMix
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.texts import Branch


class SmallerNanoVllmCache(NanoVllmEngine):
    """Builds a cache of half the size that it declares."""

    def make(self, mix: RequestMix) -> None:
        super().make(replace(mix, cache_tokens=mix.cache_tokens // 2))


class NamesAnAdapter(SglangAdapter):
    """Has a LoRA adapter for namespace 1, and for namespace 2 a caller's key: the adapter's id."""

    keys: ClassVar[Mapping[int, tuple[str | None, str | None]]] = {
        0: (None, None),
        1: (None, "5f0c"),
        2: ("5f0c", None),
    }
    """Extra key and LoRA adapter of each namespace."""

    def use_namespaces(self, names: Sequence[int]) -> None:
        self.names = names
        self.extra_keys = [self._new([0], name).extra_key for name in names]

    def _request(self, row: int = 0) -> Any:
        return self._new(self.row_tokens[row], self.names[row])

    def _new(self, text: Sequence[int], name: int) -> Any:
        return new_request(self.sgl, text, *self.keys[name])


class NamesAnotherKey(NamesAnAdapter):
    """Has a caller's key that is no adapter's id."""

    keys: ClassVar[Mapping[int, tuple[str | None, str | None]]] = {
        **NamesAnAdapter.keys,
        2: ("another", None),
    }


class KeepsTheMostRecent(SglangAdapter):
    """Promises that the least recent text is evicted first; a lookup would make a text recent."""

    prefixes = SglangAdapter.prefixes.but(evicts="least recent")
    match_prefix = KVCacheAdapter.match_prefix


def _served(adapter: type[EngineAdapter], *requests: RequestSpec, **fields: Any) -> RequestMix:
    """Return a mix with a cache of 64 tokens, if no size is given."""
    return mix_of(adapter, *requests, **{"size": 64, **fields})


def _sglang_history(*steps: Operation, texts: tuple[Branch, ...]) -> History:
    """Return a history of blocks of one token, four of them."""
    options = {"tree_core_backend": "rust"}
    spec = CacheSpec(block_size=1, num_blocks=4, num_heads=1, head_dim=1, options=options)
    return History(spec, steps, texts=texts)


def _nixl_history(tokens: int) -> History:
    """Return a history that receives a prompt, of which four tokens are stored already."""
    options = {"ranks": 1, "kv_load_failure_policy": "fail", "aborted by": "prefill side"}
    steps = (
        Prefill(0, 4),
        MakeRemote(block_size=2, num_blocks=4),
        RemotePrefill(1, tokens),
        BeginReceive(1, tokens),
        FinishReceive(1),
    )
    spec = CacheSpec(block_size=4, num_blocks=4, num_heads=1, head_dim=1, options=options)
    return History(spec, steps, texts=((0, 0),))


def _uses_of_texts(shared: int) -> History:
    """Return a history of four texts, the third of which shares tokens with the first."""
    steps = [
        step for seq, count in enumerate((2, 1, 2)) for step in (Prefill(seq, count), Free(seq))
    ]
    return _sglang_history(*steps, Prefill(3, 1), texts=((0, 0), (0, 0), (0, shared), (0, 0)))


def _named(adapter: type[EngineAdapter]) -> RequestMix:
    prompt = (1, 2, 3, 4, 6)
    return _served(
        adapter,
        RequestSpec(prompt, Sampling(3)),
        RequestSpec((20,), Sampling(3), arrival=2),
        RequestSpec((*prompt, 11), Sampling(3), arrival=4),
    )


def _stored(new_tokens: int) -> RequestMix:
    prompt, sampling = (1, 2, 3, 4, 6), Sampling(new_tokens)
    return _served(
        variants.FindsStoredPrompts,
        RequestSpec(prompt, sampling),
        RequestSpec(prompt, sampling, arrival=3),
    )


def _beside(length: int) -> RequestMix:
    other = RequestSpec((7,) * length, Sampling(1))
    return _served(variants.ServesLongRope, RequestSpec((1, 2, 3), Sampling(1)), other)


def _one(
    adapter: type[EngineAdapter], prompt: tuple[int, ...], new_tokens: int, **fields: Any
) -> RequestMix:
    return _served(adapter, RequestSpec(prompt, Sampling(new_tokens)), **fields)


def _used_again(size: int) -> RequestMix:
    """Return a mix of four requests, the second and last of which have one prompt."""
    prompts = ((2,) * 16, (1,) * 2, (3,) * 5, (1,) * 2)
    return mix_of(
        PromisesRecency,
        *(RequestSpec(text, Sampling(2), arrival=6 * at) for at, text in enumerate(prompts)),
        size=size,
        block_size=1,
        scheduling_steps_ahead=1,
    )


WRITTEN = {
    "name-used-twice": Picture(
        variants.NamesTwoAlike,
        _named(variants.NamesTwoAlike),
        "request 2, token 0: 6; alone it gets 28",
        passing=(variants.NamesRequests, _named(variants.NamesRequests)),
    ),
    "long-rope": Picture(
        variants.ServesLongRope,
        _beside(17),
        "request 0, token 0: 2; alone it gets 14",
        passing=(variants.ServesLongRope, _beside(16)),
    ),
    "soft-cap-ignored": Picture(
        variants.ServesSoftCaps,
        _one(variants.ServesSoftCaps, (1, 2, 3, 4), 5),
        "request 0, token 4: 4; alone it gets 12",
        passing=(TransformersEngine, _one(TransformersEngine, (1, 2, 3, 4), 5, attention="eager")),
    ),
    "attends-twice": Picture(
        variants.AttendsTwice,
        _one(variants.AttendsTwice, (1, 2), 3),
        "request 0, token 2: 27; alone it gets 4",
        passing=(variants.AttendsTwice, _one(variants.AttendsTwice, (1, 2), 1)),
    ),
    "own-attention": Picture(
        variants.ServesItsOwnAttention,
        _one(variants.ServesItsOwnAttention, (1,), 2),
        "request 0, token 1: 13; alone it gets 17",
        passing=(variants.ServesItsOwnAttention, _one(variants.ServesItsOwnAttention, (1,), 1)),
    ),
    "stored-in-the-last-step": Picture(
        variants.FindsStoredPrompts,
        _stored(1),
        "request 1 began with 0 cached tokens; the cache has room for the 4 that it shares",
        passing=(variants.FindsStoredPrompts, _stored(2)),
    ),
    "window-treated-as-none": Picture(
        variants.SeesOneToken,
        _one(variants.SeesOneToken, (1, 2), 1),
        "request 0, token 0: 29; alone it gets 27",
        passing=(variants.SeesFiveTokens, _one(variants.SeesFiveTokens, (1, 2), 1)),
    ),
    "sequence-outgrows-the-cache": Picture(
        SmallerNanoVllmCache,
        _one(SmallerNanoVllmCache, (1,), 4, size=4, block_size=2),
        "a step raised AssertionError",
        project="nano-vllm",
        passing=(NanoVllmEngine, _one(NanoVllmEngine, (1,), 4, size=4, block_size=2)),
    ),
    "no-tokens-wanted": Picture(
        NanoVllmEngine,
        _one(NanoVllmEngine, (1,), 0, size=8, block_size=2),
        "request 0, token 0: 10; alone it has ended by then, at its limit of 0 tokens",
        project="nano-vllm",
        passing=(NanoVllmEngine, _one(NanoVllmEngine, (1,), 1, size=8, block_size=2)),
    ),
    "block-read-in-part": Picture(
        CachingNixlVllmAdapter,
        _nixl_history(6),
        "peek: sequence 1, layer 0, K: position 4, head 0 (1 of 6 wrong): expected text 0, token 4",
        project="vllm",
        passing=(CachingNixlVllmAdapter, _nixl_history(8)),
    ),
    "key-of-an-adapter": Picture(
        NamesAnAdapter,
        _sglang_history(Prefill(0, 2), texts=((0, 0, 1), (0, WHOLE, 2))),
        "match_prefix() of text 1 (namespace 2), 2 tokens long, found 1, and only 0 of them",
        project="sglang",
        passing=(
            NamesAnotherKey,
            _sglang_history(Prefill(0, 2), texts=((0, 0, 1), (0, WHOLE, 2))),
        ),
    ),
    "suffix-made-recent": Picture(
        KeepsTheMostRecent,
        _uses_of_texts(shared=1),
        "block 3 was evicted and block 2 was not, which was released earlier",
        project="sglang",
        passing=(KeepsTheMostRecent, _uses_of_texts(shared=0)),
    ),
    "mini-sglang-too-long": Picture(
        TakesThreeTokens,
        _one(TakesThreeTokens, (1, 2, 3, 4), 1, size=8, block_size=1),
        "requests [0] have not ended after",
        project="mini-sglang",
        passing=(TakesThreeTokens, _one(TakesThreeTokens, (1, 2, 3), 1, size=8, block_size=1)),
    ),
    "mini-sglang-long-page": Picture(
        HasRowsOf32,
        _one(HasRowsOf32, (7,), 1, block_size=64),
        "a step raised IndexError: index 32 is out of bounds for dimension 1 with size 32",
        project="mini-sglang",
        passing=(HasRowsOf32, _one(HasRowsOf32, (7,), 1, block_size=32)),
    ),
    "tokasaurus-last-use": Picture(
        PromisesRecency,
        _used_again(size=19),
        "request 3 began with 0 cached tokens; the cache has room for the 1 that it shares",
        project="tokasaurus",
        passing=(PromisesRecency, _used_again(size=40)),
    ),
}
"""Pictures by their names in docs/findings."""
