"""The last layer: attention and MLP for each sequence's last token only, keys of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer.attention.backend import AttentionBackend
from roseinfer.attention.triton import TritonAttention
from roseinfer.decode.step import TokenSpan
from roseinfer.engine.runner import SequenceRunner
from roseinfer.models.families.gpt2 import FusedGPT2
from roseinfer.paths import AttentionPath
from tests.models.families import tiny
from tests.models.fused.runners import assert_close, fused_runner, transformers_logits
from tests.models.fused.test_llama import PROMPTS, family_of, network

KIN = ["llama", "qwen3", "smollm3", "olmo2", "mixtral", "gpt2"]


def build(kin: str, device: str) -> tuple[Any, SequenceRunner]:
    if kin == "gpt2":
        model = tiny("gpt2", device)
        return model, fused_runner(FusedGPT2, device, model)
    model = network(kin, device)
    return model, fused_runner(family_of(kin), device, model)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("kin", KIN)
def test_last_layer_computes_only_the_last_tokens(
    device: str, kin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = build(kin, device)
    layers = engine.model.shape.num_layers
    sessions, logits = engine.prefill(PROMPTS)
    assert_close(logits, transformers_logits(model, PROMPTS))
    assert engine.path_counts[AttentionPath.CHUNK_TRITON] == layers - 1
    assert engine.path_counts[AttentionPath.DECODE_TRITON] == 1

    _, other = build(kin, device)
    monkeypatch.setattr(TritonAttention, "can_attend_last_tokens", lambda *_: False)
    same_sessions, all_logits = other.prefill(PROMPTS)
    assert other.path_counts[AttentionPath.CHUNK_TRITON] == layers
    assert_close(logits, all_logits)
    lists = [[session.block_lists for session in each] for each in (sessions, same_sessions)]
    assert lists[0] == lists[1]
    for stored, same in ((engine.kv.keys, other.kv.keys), (engine.kv.values, other.kv.values)):
        assert torch.equal(stored.nan_to_num(9.0), same.nan_to_num(9.0))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("kin", KIN)
def test_last_layer_computes_all_tokens_for_all_logits(device: str, kin: str) -> None:
    model, engine = build(kin, device)
    sessions = [engine.new_cached_sequence(list(prompt)) for prompt in PROMPTS]
    spans = [
        TokenSpan(session, session.token_ids, all_logits=at == 2)
        for at, session in enumerate(sessions)
    ]
    logits = engine.forward(spans)
    prefixes = [PROMPTS[0], PROMPTS[1], *(PROMPTS[2][: end + 1] for end in range(len(PROMPTS[2])))]
    assert_close(logits, transformers_logits(model, prefixes))
    assert engine.path_counts[AttentionPath.CHUNK_TRITON] == engine.model.shape.num_layers
    assert not engine.path_counts[AttentionPath.DECODE_TRITON]


@pytest.mark.parametrize("kin", ["llama", "gpt2"])
def test_backend_may_compute_all_tokens(
    device: str, kin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        AttentionBackend, "can_attend_last_tokens", lambda _, rows: rows is not None
    )
    model, fused_engine = build(kin, device)
    engine = SequenceRunner(fused_engine.model, fused_engine.kv, attention="reference")
    _, logits = engine.prefill(PROMPTS)
    assert_close(logits, transformers_logits(model, PROMPTS))
    assert len(logits) == len(PROMPTS)


def test_decoding_sequences_before_prompts(device: str) -> None:
    model, engine = build("llama", device)
    sessions, _ = engine.prefill(PROMPTS[:2])
    for session in sessions:
        session.token_ids.append(11)
    sessions.append(engine.new_cached_sequence(list(PROMPTS[2])))
    logits = engine.extend(sessions)
    assert_close(logits, transformers_logits(model, [each.token_ids for each in sessions]))
