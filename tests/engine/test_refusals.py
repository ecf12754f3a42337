"""What the engine refuses, by name, before it could compute anything wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from roseinfer import BadArgument, OutOfBlocks, UnsupportedModel
from roseinfer.model import CausalModel, fetch
from tests.engine.families import CONFIGS, VOCABULARY, tiny
from tests.engine.test_against_transformers import engine_for, prompts


def build(config: Any, **options: Any) -> CausalModel:
    return CausalModel(transformers.AutoModelForCausalLM.from_config(config), **options)


def test_a_sliding_window_that_can_slide() -> None:
    config = CONFIGS["mistral"]()
    config.sliding_window = 32
    with pytest.raises(UnsupportedModel, match="sliding window of 32 tokens"):
        build(config)
    assert build(config, max_length=32).shape.max_length == 32


def test_soft_capped_attention() -> None:
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=32,
    )
    with pytest.raises(UnsupportedModel, match="soft-capped attention"):
        build(config)


def test_a_model_without_the_attention_interface() -> None:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModel, match="Bloom"):
        build(config)


def test_more_positions_than_the_model_has() -> None:
    with pytest.raises(UnsupportedModel, match="the model has 96 positions"):
        build(CONFIGS["gpt2"](), max_length=97)


def test_a_missing_checkpoint(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        fetch(str(tmp_path), torch.float32)


def test_a_checkpoint_from_disk_is_the_model_that_was_saved(tmp_path: Any, device: str) -> None:
    model = tiny("llama", device)
    model.save_pretrained(tmp_path)
    loaded = fetch(str(tmp_path), torch.float32)
    assert CausalModel(loaded).shape == CausalModel(model).shape


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "an empty prompt"),
        ([1] * 97, "97 tokens for a model of 96 positions"),
        ([VOCABULARY], "token ids must lie in 0..96"),
        ([-1], "token ids must lie in 0..96"),
    ],
    ids=["empty", "too long", "unknown", "negative"],
)
def test_bad_prompts_leave_the_engine_as_it_was(
    device: str, prompt: list[int], message: str
) -> None:
    engine = engine_for("gpt2", device)
    free = engine.kv.num_free_blocks(0)
    with pytest.raises(BadArgument, match=message):
        engine.prefill([[1, 2], prompt])
    assert engine.kv.num_free_blocks(0) == free


def test_a_batch_without_room_changes_no_session(device: str) -> None:
    engine = engine_for("gpt2", device)
    sessions, logits = engine.prefill(prompts(4, 4))
    held = [engine.fork(sessions[0]) for _ in range(3)]
    taken = [engine.kv.plan_append(0, [[]]) for _ in range(engine.kv.num_free_blocks(0) - 1)]
    for session, row in zip(sessions, logits, strict=True):
        session.token_ids.append(int(row.argmax()))
    before = [(session.block_lists[0][:], session.stored) for session in sessions]
    with pytest.raises(OutOfBlocks):
        engine.extend(sessions)
    assert [(session.block_lists[0], session.stored) for session in sessions] == before
    assert len(held) == 3
    assert taken
