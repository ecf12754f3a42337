"""The last layer computes what follows the last tokens alone, and stores the keys of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer.attention.backend import AttentionBackend
from roseinfer.attention.triton import TritonAttention
from roseinfer.engine.runner import SequenceRunner
from roseinfer.models.families.gpt2 import FusedGPT2
from roseinfer.paths import AttentionPath
from tests.models.families import tiny
from tests.models.fused.runners import assert_close, by_transformers, fused
from tests.models.fused.test_llama import PROMPTS, family_of, network

KIN = ["llama", "qwen3", "smollm3", "olmo2", "mixtral", "gpt2"]


def made(kin: str, device: str) -> tuple[Any, SequenceRunner]:
    if kin == "gpt2":
        model = tiny("gpt2", device)
        return model, fused(FusedGPT2, device, model)
    model = network(kin, device)
    return model, fused(family_of(kin), device, model)


@pytest.mark.parametrize("kin", KIN)
def test_nothing_is_computed_for_tokens_that_nobody_asks_for(
    device: str, kin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = made(kin, device)
    layers = engine.model.shape.num_layers
    sessions, logits = engine.prefill(PROMPTS)
    assert_close(logits, by_transformers(model, PROMPTS))
    assert engine.path_counts[AttentionPath.CHUNK_TRITON] == layers - 1
    assert engine.path_counts[AttentionPath.DECODE_TRITON] == 1

    _, other = made(kin, device)
    monkeypatch.setattr(TritonAttention, "can_attend_last_tokens", lambda *_: False)
    same_sessions, all_logits = other.prefill(PROMPTS)
    assert other.path_counts[AttentionPath.CHUNK_TRITON] == layers
    assert_close(logits, all_logits)
    lists = [[session.block_lists for session in each] for each in (sessions, same_sessions)]
    assert lists[0] == lists[1]
    for stored, same in ((engine.kv.keys, other.kv.keys), (engine.kv.values, other.kv.values)):
        assert torch.equal(stored.nan_to_num(9.0), same.nan_to_num(9.0))


@pytest.mark.parametrize("kin", KIN)
def test_all_is_computed_where_each_token_is_asked_for(device: str, kin: str) -> None:
    model, engine = made(kin, device)
    sessions = [engine.new_cached_sequence(list(prompt)) for prompt in PROMPTS]
    logits = engine.extend(sessions, with_all_logits={2})
    every = [PROMPTS[0], PROMPTS[1], *(PROMPTS[2][: end + 1] for end in range(len(PROMPTS[2])))]
    assert_close(logits, by_transformers(model, every))
    assert engine.path_counts[AttentionPath.CHUNK_TRITON] == engine.model.shape.num_layers
    assert not engine.path_counts[AttentionPath.DECODE_TRITON]


@pytest.mark.parametrize("kin", ["llama", "gpt2"])
def test_a_backend_may_attend_from_all(
    device: str, kin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        AttentionBackend, "can_attend_last_tokens", lambda _, rows: rows is not None
    )
    model, made_for = made(kin, device)
    engine = SequenceRunner(made_for.model, made_for.kv, attention="reference")
    _, logits = engine.prefill(PROMPTS)
    assert_close(logits, by_transformers(model, PROMPTS))
    assert len(logits) == len(PROMPTS)


def test_one_token_each_in_front_of_prompts(device: str) -> None:
    model, engine = made("llama", device)
    sessions, _ = engine.prefill(PROMPTS[:2])
    for session in sessions:
        session.token_ids.append(11)
    sessions.append(engine.new_cached_sequence(list(PROMPTS[2])))
    logits = engine.extend(sessions)
    assert_close(logits, by_transformers(model, [each.token_ids for each in sessions]))
