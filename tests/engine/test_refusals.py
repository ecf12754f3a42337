"""What the engine refuses, by name, before it could compute anything wrongly."""

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


def test_a_model_without_the_attention_interface() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModel, match=r"OpenAIGPT.* does not use transformers' attention"):
        build(config)


def test_why_a_model_has_no_shape_is_said_in_a_sentence() -> None:
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
_CONVOLUTION = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
"""It remembers the last tokens by itself."""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.BertConfig(**_SMALL, is_decoder=False), "attends to later tokens too"),
        (transformers.Lfm2Config(**_SMALL | _CONVOLUTION), r"layers that did are \[1\]"),
        (transformers.DiffLlamaConfig(**_SMALL), r"layers that did are \[0, 0\]"),
        (transformers.DogeConfig(**_SMALL), "passes a mask to its attention"),
    ],
    ids=["looks_ahead", "convolution", "attends_twice", "wants_a_mask"],
)
def test_layers_that_do_not_attend_as_ours_do(config: Any, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        build(config)


def test_more_positions_than_the_model_has() -> None:
    with pytest.raises(UnsupportedModel, match="has 96 positions"):
        build(CONFIGS["gpt2"](), max_length=97)


@pytest.mark.parametrize("wrong", [{"n_head": 0}, {"n_head": "x"}, {"n_embd": None}])
def test_a_config_that_makes_no_sense(tmp_path: Any, wrong: dict[str, Any]) -> None:
    tiny("gpt2", "cpu").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_an_error_of_transformers_is_told_with_its_kind(tmp_path: Any) -> None:
    """Alone it says ``'os.system'``, and nothing of where that stands."""
    tiny("gpt2", "cpu").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    told = json.loads(config.read_text()) | {"activation_function": "os.system"}
    config.write_text(json.dumps(told))
    with pytest.raises(UnsupportedModel, match=r"its config and weights: KeyError: 'os\.system'"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_a_tokenizer_that_makes_no_sense(tmp_path: Any) -> None:
    tiny("gpt2", "cpu").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(UnsupportedModel, match=r"the tokenizer of .* cannot be loaded"):
        LLM(tmp_path, device="cpu")


def test_what_is_no_model() -> None:
    with pytest.raises(ConfigError, match="None is not a model"):
        LLM(None, device="cpu")


def test_a_missing_checkpoint(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_a_checkpoint_from_disk_is_the_model_that_was_saved(tmp_path: Any, device: str) -> None:
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
    before = [(session.block_lists[0][:], session.num_stored) for session in sessions]
    with pytest.raises(OutOfBlocks):
        engine.extend(sessions)
    assert [(session.block_lists[0], session.num_stored) for session in sessions] == before
    assert len(held) == 3
    assert taken
