"""Unsupported models and bad prompts: each is rejected with a named error."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from roseinfer import LLM, BadArgument, ConfigError, OutOfBlocks, UnsupportedModel
from roseinfer.models.causal import CausalModel
from roseinfer.models.checkpoint import load_checkpoint
from tests.models.families import CONFIGS, VOCABULARY, tiny
from tests.models.test_against_transformers import engine_for, prompts


def build(config: Any, **options: Any) -> CausalModel:
    return CausalModel(transformers.AutoModelForCausalLM.from_config(config), **options)


def test_model_without_the_attention_interface_is_rejected() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModel, match=r"OpenAIGPT.* does not use transformers' attention"):
        build(config)


def test_unreadable_shape_is_reported_in_one_sentence() -> None:
    model = tiny("gpt2", "cpu")

    def fail() -> None:
        raise AttributeError("'n_head' differs. Ask each layer instead. Beware.")

    model.config.get_text_config = fail
    with pytest.raises(
        UnsupportedModel, match=r"has no readable shape in its config: 'n_head' differs$"
    ):
        CausalModel(model)


_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_WITH_CONVOLUTION = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
"""A layer with a state of its own."""


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.BertConfig(**_SMALL, is_decoder=False), "attends to later tokens too"),
        (transformers.Lfm2Config(**_SMALL | _WITH_CONVOLUTION), r"layers that did are \[1\]"),
        (transformers.DiffLlamaConfig(**_SMALL), r"layers that did are \[0, 0\]"),
        (transformers.DogeConfig(**_SMALL), "passes a mask to its attention"),
    ],
    ids=["looks_ahead", "convolution", "attends_twice", "wants_a_mask"],
)
def test_unsupported_layers_are_rejected(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        build(config)


def test_max_length_beyond_the_positions_of_the_model_is_rejected() -> None:
    with pytest.raises(UnsupportedModel, match="has 96 positions"):
        build(CONFIGS["gpt2"](), max_length=97)


@pytest.mark.parametrize("invalid", [{"n_head": 0}, {"n_head": "x"}, {"n_embd": None}])
def test_invalid_config_is_rejected(tmp_path: Any, invalid: dict[str, Any]) -> None:
    tiny("gpt2", "cpu").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | invalid))
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_error_of_transformers_is_reported_with_its_type(tmp_path: Any) -> None:
    """The error's own text is just ``'os.system'``."""
    tiny("gpt2", "cpu").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    content = json.loads(config.read_text()) | {"activation_function": "os.system"}
    config.write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=r"its config and weights: KeyError: 'os\.system'"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_invalid_tokenizer_is_rejected(tmp_path: Any) -> None:
    tiny("gpt2", "cpu").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(UnsupportedModel, match=r"the tokenizer of .* cannot be loaded"):
        LLM(tmp_path, device="cpu")


def test_none_is_rejected_as_a_model() -> None:
    with pytest.raises(ConfigError, match="None is not a model"):
        LLM(None, device="cpu")


def test_missing_checkpoint_is_rejected(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_loaded_checkpoint_has_the_shape_of_the_saved_model(tmp_path: Any, device: str) -> None:
    model = tiny("llama", device)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(str(tmp_path), torch.float32)
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
def test_bad_prompts_change_no_engine_state(device: str, prompt: list[int], message: str) -> None:
    engine = engine_for("gpt2", device)
    free = engine.kv.num_free_blocks(0)
    with pytest.raises(BadArgument, match=message):
        engine.prefill([[1, 2], prompt])
    assert engine.kv.num_free_blocks(0) == free


def test_batch_without_free_blocks_changes_no_sequence(device: str) -> None:
    engine = engine_for("gpt2", device)
    sessions, logits = engine.prefill(prompts(4, 4))
    forks = [engine.fork(sessions[0]) for _ in range(3)]
    blocks = [engine.kv.plan_append(0, [[]]) for _ in range(engine.kv.num_free_blocks(0) - 1)]
    for session, row in zip(sessions, logits, strict=True):
        session.token_ids.append(int(row.argmax()))
    before = [(session.block_lists[0][:], session.num_stored) for session in sessions]
    with pytest.raises(OutOfBlocks):
        engine.extend(sessions)
    assert [(session.block_lists[0], session.num_stored) for session in sessions] == before
    assert len(forks) == 3
    assert blocks


@pytest.mark.parametrize("count", [3, 0])
def test_counts_of_tokens_to_store_are_checked(device: str, count: int) -> None:
    runner = engine_for("gpt2", device)
    sequences = [runner.new_cached_sequence([1] * tokens) for tokens in (3, 2)]
    words = f"sequence 1: it has 2 tokens to store, not {count}"
    with pytest.raises(BadArgument, match=words):
        runner.extend(sequences, [3, count])
    runner.extend(sequences, [2, 1])
    assert [each.num_stored for each in sequences] == [2, 1]
