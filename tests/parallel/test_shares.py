"""Ranks compute a model together: its texts, tables and caches are those of one process."""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from roseinfer import LLM, RanksFailed, SamplingParams
from roseinfer.decode.readback import Arrival
from roseinfer.kv.storage import DataMover
from roseinfer.ranks.orders import Tell
from tests.engine.families import POSITIONS, VOCABULARY
from tests.parallel.followers import build, in_threads

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW = 7


def _gpt2(**_: Any) -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=4, n_positions=POSITIONS
    )


MODELS: dict[str, Callable[..., Any]] = {
    "gpt2": _gpt2,
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "phi3": lambda **shape: transformers.Phi3Config(**shape, pad_token_id=0),
    "mistral": lambda **shape: transformers.MistralConfig(**shape, sliding_window=WINDOW),
    "gemma2": lambda **shape: transformers.Gemma2Config(
        **shape, sliding_window=WINDOW, attn_logit_softcapping=4.0
    ),
}
SIZES: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "kv_cache_tokens": 240,
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"resident_decode": False},
    "resident": {"resident_decode": True, "run_ahead": 2, "prefill_max_tokens": 7},
    "speculating": {"speculation": "ngram", "resident_decode": True},
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [*range(20, 45)], [5, 6, 7, 8, 9, 10, 12], [1, 2] * 9]
PARAMS = [
    SamplingParams(temperature=0, max_new_tokens=24),
    SamplingParams(temperature=1, seed=4, max_new_tokens=17, logprobs=True),
    SamplingParams(temperature=0, max_new_tokens=20, presence_penalty=0.5),
    SamplingParams(temperature=0.7, seed=9, top_k=20, max_new_tokens=9),
    SamplingParams(temperature=0, max_new_tokens=30),
]


def texts(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.token_ids for output in outputs]


def run_to_the_end(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()


CASES = [
    *((model, "resident") for model in MODELS),
    *((model, "plain") for model in ("gpt2", "mistral")),
    ("llama", "speculating"),
]


@pytest.mark.parametrize(("model", "way"), CASES)
def test_texts_are_those_of_one_process(
    model: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_threads(monkeypatch)
    alone = LLM(build(MODELS[model]), **SIZES, **WAYS[way])
    size = 4 if model in ("llama", "gpt2") else 2
    shared = LLM(build(MODELS[model]), tensor_parallel_size=size, **SIZES, **WAYS[way])
    heads = alone.engine.sessions.kv.num_heads
    assert shared.engine.sessions.kv.num_heads == heads // size
    for _ in range(2):  # the second time with prefixes from the first
        assert texts(shared) == texts(alone)


@pytest.mark.parametrize("style", ["embedding_rowwise", "rowwise", "of another version"])
def test_an_embedding_stays_whole_and_the_head_that_was_tied_to_it_is_cut(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers 5.17 plans to cut such an embedding by its rows."""
    in_threads(monkeypatch)
    config = transformers.LlamaConfig
    plan = {**config.base_model_tp_plan, "embed_tokens": style}
    monkeypatch.setattr(config, "base_model_tp_plan", plan)
    alone, cut = (build(config, tie_word_embeddings=True) for _ in range(2))
    shared = LLM(cut, tensor_parallel_size=2, **SIZES, **WAYS["resident"])
    assert texts(shared) == texts(LLM(alone, **SIZES, **WAYS["resident"]))
    whole, head = cut.model.embed_tokens.weight, cut.lm_head.weight
    assert whole.shape[0] == VOCABULARY
    assert head.shape[0] < VOCABULARY
    assert torch.equal(head, whole[: len(head)])
    assert head.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def tables_of(llm: LLM) -> list[Any]:
    """Return what the leader has on its device of the slots' blocks."""
    rows = llm.engine._runner._resident.slots.rows  # type: ignore[union-attr]
    return [table.tolist() for table in rows.tables(len(rows.tokens))]


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_tables_are_equal_on_all_ranks_after_every_step(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is too small for all, and some begin alike."""
    in_threads(monkeypatch)
    sizes = SIZES | {"kv_cache_tokens": 72, "max_batch_size": 4}
    llm = LLM(build(MODELS[model]), tensor_parallel_size=2, resident_decode=True, **sizes)
    assert llm.ranks is not None
    forwards: list[Any] = []
    prepare = llm.engine.sessions.attention.prepare

    def noted(batch: Any) -> None:
        if hasattr(batch, "block_lists"):
            forwards.append(deepcopy(batch.block_lists))
        prepare(batch)

    monkeypatch.setattr(llm.engine.sessions.attention, "prepare", noted)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        llm.engine.submit(prompt, params)
    steps = 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
        ((lists, slots),) = llm.ranks.ask(Tell("tables"))
        assert lists == forwards[-1]
        assert slots == tables_of(llm)
    assert steps > 30
    assert llm.engine.num_preemptions or model == "mistral"


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_the_shares_of_the_cache_are_the_whole(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads(monkeypatch)
    way = WAYS["resident"]
    alone = LLM(build(MODELS[model]), **SIZES, **way)
    shared = LLM(build(MODELS[model]), tensor_parallel_size=2, **SIZES, **way)
    assert shared.ranks is not None
    for llm in (alone, shared):
        assert len([*islice(llm.stream(PROMPTS[2], PARAMS[4]), 12)]) == 12
    whole, own = alone.engine.sessions.kv, shared.engine.sessions.kv
    (others,) = shared.ranks.ask(Tell("caches"))
    for kind, mine, theirs in zip(
        (whole.keys, whole.values), (own.keys, own.values), others, strict=True
    ):
        assert kind.any()
        # The scratch block has what padding wrote last.
        together = torch.cat([mine, theirs], 2)[:, 1:]
        torch.testing.assert_close(together, kind[:, 1:], atol=1e-4, rtol=1e-4)


def test_the_rank_with_the_least_memory_says_how_many_blocks_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from roseinfer.models import loading

    class _ByThread(int):
        """Room in main memory, of which another rank has less."""

        def __floordiv__(self, other: int) -> int:
            import threading

            here = threading.current_thread().name
            return (40_000 if here == "rank 1" else 400_000) // other

    in_threads(monkeypatch)
    monkeypatch.setattr(loading, "_MOST_ON_CPU", _ByThread())
    sizes = SIZES | {"kv_cache_tokens": None}
    llm = LLM(build(MODELS["llama"]), tensor_parallel_size=2, max_batch_size=64, **sizes)
    kv = llm.engine.sessions.kv
    token_bytes = 2 * 2 * 2 * 12 * 4  # keys and values, layers, heads of this rank, width, bytes
    assert kv.max_blocks_per_layer == -(-(40_000 // token_bytes) // 4) + 1
    assert len(texts(llm)[0]) == 24


def test_numbers_that_come_after_a_rank_has_ended_are_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that waited for it goes on without, and what it computes then is no token."""
    started = in_threads(monkeypatch)
    llm = LLM(build(MODELS["llama"]), tensor_parallel_size=2, **SIZES, **WAYS["resident"])
    ranks, wait = llm.ranks, Arrival.wait
    assert ranks is not None

    def late(arrival: Arrival) -> list[Any]:
        ranks.links._fail(RanksFailed("rank 1 has ended"))
        return wait(arrival)

    monkeypatch.setattr(Arrival, "wait", late)
    request = llm.engine.submit(PROMPTS[0], PARAMS[0])
    with pytest.raises(RanksFailed, match="rank 1 has ended"):
        run_to_the_end(llm)
    assert not request.num_generated
    ranks.links.close()
    started[0].wait()


def test_ranks_that_are_let_go_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started = in_threads(monkeypatch)
    llm = LLM(build(MODELS["llama"]), tensor_parallel_size=2, **SIZES)
    assert llm.ranks is not None
    llm.ranks.links.close()
    started[0].wait()
    assert not started[0].thread.is_alive()
    assert started[0].error == []


def test_only_copies_that_are_made_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy of a shared block is made on both ranks."""
    in_threads(monkeypatch)
    made: list[tuple[int, int]] = []
    copy_shared = DataMover.copy_shared

    def noted(mover: DataMover, plan: Any) -> None:
        if plan.copy_to:
            made.append((id(mover), len(plan.copy_to)))
        copy_shared(mover, plan)

    monkeypatch.setattr(DataMover, "copy_shared", noted)
    llm = LLM(build(MODELS["llama"]), tensor_parallel_size=2, resident_decode=False, **SIZES)
    runner = llm.engine.sessions
    (session,), _ = runner.prefill([[5, 6, 7, 8, 9]])
    child = runner.fork(session)
    for each in (session, child):
        each.token_ids.append(3)
    runner.extend([session, child])
    assert llm.ranks is not None
    llm.ranks.ask(Tell("tables"))  # when it answers, it has done all
    assert len({mover for mover, _ in made}) == 2
    assert [count for _, count in made] == [1, 1]
