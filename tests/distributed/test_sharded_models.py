"""Ranks compute a model together: its texts are those of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from roseinfer import LLM, RanksFailed, SamplingParams
from roseinfer.decode.readback import PendingReadback
from roseinfer.distributed.orders import ReportState
from roseinfer.kv.storage import AppendExecutor
from tests.distributed.followers import build, in_threads
from tests.models.families import POSITIONS, VOCABULARY

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


@pytest.mark.many_alike
@pytest.mark.parametrize(("model", "way"), CASES)
def test_texts_are_those_of_one_process(
    model: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_threads(monkeypatch)
    alone = LLM(build(MODELS[model]), **SIZES, **WAYS[way])
    size = 4 if model in ("llama", "gpt2") else 2
    shared = LLM(build(MODELS[model]), tensor_parallel_size=size, **SIZES, **WAYS[way])
    heads = alone.engine.sequence_runner.kv.num_heads
    assert shared.engine.sequence_runner.kv.num_heads == heads // size
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


def test_numbers_that_come_after_a_rank_has_ended_are_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that waited for it goes on without, and what it computes then is no token."""
    started = in_threads(monkeypatch)
    llm = LLM(build(MODELS["llama"]), tensor_parallel_size=2, **SIZES, **WAYS["resident"])
    ranks, wait = llm.ranks, PendingReadback.wait
    assert ranks is not None

    def late(arrival: PendingReadback) -> list[Any]:
        ranks.rank_connections._fail(RanksFailed("rank 1 has ended"))
        return wait(arrival)

    monkeypatch.setattr(PendingReadback, "wait", late)
    request = llm.engine.submit(PROMPTS[0], PARAMS[0])
    with pytest.raises(RanksFailed, match="rank 1 has ended"):
        run_to_the_end(llm)
    assert not request.num_generated
    ranks.rank_connections.close()
    started[0].wait()


def test_ranks_that_are_let_go_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started = in_threads(monkeypatch)
    llm = LLM(build(MODELS["llama"]), tensor_parallel_size=2, **SIZES)
    assert llm.ranks is not None
    llm.ranks.rank_connections.close()
    started[0].wait()
    assert not started[0].thread.is_alive()
    assert started[0].error == []


def test_only_copies_that_are_made_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy of a shared block is made on both ranks."""
    in_threads(monkeypatch)
    made: list[tuple[int, int]] = []
    copy_shared_blocks = AppendExecutor.copy_shared_blocks

    def noted(mover: AppendExecutor, plan: Any) -> None:
        if plan.copy_to:
            made.append((id(mover), len(plan.copy_to)))
        copy_shared_blocks(mover, plan)

    monkeypatch.setattr(AppendExecutor, "copy_shared_blocks", noted)
    llm = LLM(build(MODELS["llama"]), tensor_parallel_size=2, resident_decode=False, **SIZES)
    runner = llm.engine.sequence_runner
    (session,), _ = runner.prefill([[5, 6, 7, 8, 9]])
    child = runner.fork(session)
    for each in (session, child):
        each.token_ids.append(3)
    runner.extend([session, child])
    assert llm.ranks is not None
    llm.ranks.query_ranks(ReportState("tables"))  # when it answers, it has done all
    assert len({mover for mover, _ in made}) == 2
    assert [count for _, count in made] == [1, 1]
