"""Sharded models: the same tokens as one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from roseinfer import LLM, RanksFailed, SamplingParams
from roseinfer.distributed.ranks import ReportState
from roseinfer.kv.storage import AppendExecutor
from roseinfer.kv.transfers import PendingReadback
from roseinfer.paths import EnginePath
from tests.distributed.followers import build, run_ranks_in_threads
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
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"resident_decode": False},
    "resident": {"resident_decode": True, "run_ahead": 2, "prefill_max_tokens": 7},
    "speculation": {"speculation": "ngram", "resident_decode": True},
    "rows": {"resident_decode": True, "prompt_rows": 30, "prefill_max_batch_size": 1},
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [*range(20, 45)], [5, 6, 7, 8, 9, 10, 12], [1, 2] * 9]
PARAMS = [
    SamplingParams(temperature=0, max_new_tokens=24),
    SamplingParams(temperature=1, seed=4, max_new_tokens=17, logprobs=True),
    SamplingParams(temperature=0, max_new_tokens=20, presence_penalty=0.5),
    SamplingParams(temperature=0.7, seed=9, top_k=20, max_new_tokens=9),
    SamplingParams(temperature=0, max_new_tokens=30),
]


def generate_tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.token_ids for output in outputs]


def run_to_the_end(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()


CASES = [
    *((model, "resident") for model in MODELS),
    *((model, "plain") for model in ("gpt2", "mistral")),
    ("llama", "speculation"),
    *((model, "rows") for model in ("gpt2", "llama", "mistral")),
]
_PATHS = {
    "speculation": EnginePath.DRAFT_VERIFICATION,
    "rows": EnginePath.PROMPTS_AS_ROWS,
    "resident": EnginePath.RESIDENT,
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize(("model", "setting"), CASES)
def test_completions_match_one_process(
    model: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks_in_threads(monkeypatch)
    alone = LLM(build(MODELS[model]), **SIZES, **SETTINGS[setting])
    size = 4 if model in ("llama", "gpt2") else 2
    sharded = LLM(build(MODELS[model]), tensor_parallel_size=size, **SIZES, **SETTINGS[setting])
    heads = alone.engine.sequence_runner.kv.num_heads
    assert sharded.engine.sequence_runner.kv.num_heads == heads // size
    for _ in range(2):  # the second time with prefixes from the first
        assert generate_tokens(sharded) == generate_tokens(alone)
    if setting in _PATHS:
        assert sharded.engine.path_counts[_PATHS[setting]]


@pytest.mark.sampled_cases
@pytest.mark.parametrize("style", ["embedding_rowwise", "rowwise", "other version"])
def test_tied_embedding_stays_whole_and_the_head_is_sharded(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers 5.17 plans to shard such an embedding by rows."""
    run_ranks_in_threads(monkeypatch)
    config = transformers.LlamaConfig
    plan = {**config.base_model_tp_plan, "embed_tokens": style}
    monkeypatch.setattr(config, "base_model_tp_plan", plan)
    alone, sharded_model = (build(config, tie_word_embeddings=True) for _ in range(2))
    sharded = LLM(sharded_model, tensor_parallel_size=2, **SIZES, **SETTINGS["resident"])
    assert generate_tokens(sharded) == generate_tokens(LLM(alone, **SIZES, **SETTINGS["resident"]))
    embedding, head = sharded_model.model.embed_tokens.weight, sharded_model.lm_head.weight
    assert embedding.shape[0] == VOCABULARY
    assert head.shape[0] < VOCABULARY
    assert torch.equal(head, embedding[: len(head)])
    assert head.untyped_storage().data_ptr() != embedding.untyped_storage().data_ptr()


def test_readbacks_after_a_rank_ended_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that waited for the rank continues, and what it computes then is not a token."""
    started = run_ranks_in_threads(monkeypatch)
    llm = LLM(build(MODELS["llama"]), tensor_parallel_size=2, **SIZES, **SETTINGS["resident"])
    ranks, wait = llm.ranks, PendingReadback.wait
    assert ranks is not None

    def wait_and_fail(arrival: PendingReadback) -> list[Any]:
        ranks.rank_connections._fail(RanksFailed("rank 1 has ended"))
        return wait(arrival)

    monkeypatch.setattr(PendingReadback, "wait", wait_and_fail)
    request = llm.engine.submit(PROMPTS[0], PARAMS[0])
    with pytest.raises(RanksFailed, match="rank 1 has ended"):
        run_to_the_end(llm)
    assert not request.num_generated
    ranks.rank_connections.close()
    started[0].wait()


def test_released_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started = run_ranks_in_threads(monkeypatch)
    llm = LLM(build(MODELS["llama"]), tensor_parallel_size=2, **SIZES)
    assert llm.ranks is not None
    llm.ranks.rank_connections.close()
    started[0].wait()
    assert not started[0].thread.is_alive()
    assert started[0].error == []


def test_each_block_copy_runs_once_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy of a shared block is made on both ranks."""
    run_ranks_in_threads(monkeypatch)
    copies: list[tuple[int, int]] = []
    copy_shared_blocks = AppendExecutor.copy_shared_blocks

    def recorded_copy(mover: AppendExecutor, plan: Any) -> None:
        if plan.copy_to:
            copies.append((id(mover), len(plan.copy_to)))
        copy_shared_blocks(mover, plan)

    monkeypatch.setattr(AppendExecutor, "copy_shared_blocks", recorded_copy)
    llm = LLM(build(MODELS["llama"]), tensor_parallel_size=2, resident_decode=False, **SIZES)
    runner = llm.engine.sequence_runner
    (session,), _ = runner.prefill([[5, 6, 7, 8, 9]])
    child = runner.fork(session)
    for each in (session, child):
        each.token_ids.append(3)
    runner.extend([session, child])
    assert llm.ranks is not None
    llm.ranks.query_ranks(ReportState("tables"))  # after the reply, all commands have run
    assert len({mover for mover, _ in copies}) == 2
    assert [count for _, count in copies] == [1, 1]
