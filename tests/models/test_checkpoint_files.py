"""Files of a checkpoint: they may name only the checkpoint's own weights, and no code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import save_file

from roseinfer import UnsupportedModel
from roseinfer.models.checkpoint import load_checkpoint
from tests.models.families import VOCABULARY, tiny
from tests.models.test_checkpoints import edit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INDEX = "model.safetensors.index.json"


def sharded(directory: Path) -> Path:
    """Save a model in several files with an index."""
    tiny("gpt2", "cpu").save_pretrained(directory, max_shard_size="50KB")
    assert (directory / INDEX).is_file()
    return directory


def in_a_hub_cache(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return a function that moves the directory into an offline hub cache and returns its name."""
    cache = directory.parent / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def download() -> str:
        repository, commit = cache / "models--some--model", "0" * 40
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        (repository / "snapshots").mkdir()
        directory.rename(repository / "snapshots" / commit)
        return "some/model"

    return download


@pytest.fixture(params=["directory", "hub"])
def saved_model(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Callable[[], str]]:
    """Directory to save a model in, and a function that returns the name to load it by."""
    directory = tmp_path / "model"
    directory.mkdir()
    if request.param == "hub":
        return directory, in_a_hub_cache(directory, monkeypatch)
    return directory, lambda: str(directory)


def same_weights(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("save", [sharded, tiny("gpt2", "cpu").save_pretrained])
def test_checkpoint_in_one_file_or_several(
    saved_model: tuple[Path, Callable[[], str]], save: Callable[[Path], object]
) -> None:
    directory, name = saved_model
    save(directory)
    assert same_weights(load_checkpoint(name(), torch.float32), tiny("gpt2", "cpu"))


@pytest.mark.parametrize(
    "shard", ["pytorch_model.bin", "../outside.safetensors", "{root}/outside.safetensors", "..\\w"]
)
def test_index_with_an_outside_shard_is_rejected(
    saved_model: tuple[Path, Callable[[], str]], shard: str
) -> None:
    """A shard of that name exists with the weights, but is not read."""
    directory, name = saved_model
    shard = shard.format(root=directory.parent)
    sharded(directory)
    weights = {key: tensor.clone() for key, tensor in tiny("gpt2", "cpu").state_dict().items()}
    weights.pop("lm_head.weight")
    if shard.endswith(".bin"):
        torch.save(weights, directory / shard)
    else:
        save_file(weights, directory / shard, metadata={"format": "pt"})

    def point_to_shard(index: dict[str, Any]) -> None:
        index["weight_map"] = dict.fromkeys(index["weight_map"], shard)

    edit(directory / INDEX, point_to_shard)
    with pytest.raises(UnsupportedModel, match="must be a safetensors file in its own directory"):
        load_checkpoint(name(), torch.float32)


@pytest.mark.parametrize(
    "weights", ["../outside.safetensors", "adapter_model.bin", "a/b.index.json"]
)
def test_config_with_outside_weights_is_rejected(tmp_path: Path, weights: str) -> None:
    tiny("gpt2", "cpu").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(transformers_weights=weights))
    with pytest.raises(UnsupportedModel, match="must be a safetensors file in its own directory"):
        load_checkpoint(str(tmp_path), torch.float32)


def test_config_may_name_its_own_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    own = "own.safetensors.index.json"
    (tmp_path / INDEX).rename(tmp_path / own)
    edit(tmp_path / "config.json", lambda config: config.update(transformers_weights=own))
    assert same_weights(load_checkpoint(str(tmp_path), torch.float32), tiny("gpt2", "cpu"))
    edit(tmp_path / own, lambda index: index["weight_map"].update(extra="../extra.safetensors"))
    with pytest.raises(UnsupportedModel, match="must be a safetensors file in its own directory"):
        load_checkpoint(str(tmp_path), torch.float32)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels that transformers tried to download."""
    requested: list[str] = []

    def refuse(name: str, **_: Any) -> None:
        requested.append(name)
        raise OSError(f"{name} would be fetched")

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", refuse)
    return requested


CHOICES = [
    {"attn_implementation": "some/kernel"},
    {"_attn_implementation": "some/kernel@main:attend"},
    {"attn_implementation": {"": "some/kernel"}},
    {"attn_implementation": "flash_attention_2"},
    {"experts_implementation": "some/experts"},
    {"_experts_implementation": "some/experts"},
    {"fusion_config": {"no_such_fusion": True}},
]


@pytest.mark.parametrize("choice", CHOICES, ids=json.dumps)
def test_config_cannot_choose_code(tmp_path: Path, kernels: list[str], choice: Any) -> None:
    tiny("gpt2", "cpu").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(choice))
    assert same_weights(load_checkpoint(str(tmp_path), torch.float32), tiny("gpt2", "cpu"))
    assert kernels == []


@pytest.mark.parametrize(
    "choice",
    [
        {"attn_implementation": "some/kernel"},
        {"attn_implementation": {"text_config": "some/kernel"}},
        {"_experts_implementation": {"text_config": "some/experts"}},
    ],
    ids=json.dumps,
)
def test_nested_config_cannot_choose_code(tmp_path: Path, kernels: list[str], choice: Any) -> None:
    text = transformers.Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        intermediate_size_mlp=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
    )
    transformers.Llama4Config(text_config=text.to_dict()).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(choice))
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lacks .* weights"):  # after building the model
        load_checkpoint(str(tmp_path), torch.float32)
    assert kernels == []


def test_adapter_is_rejected(saved_model: tuple[Path, Callable[[], str]]) -> None:
    """With it transformers would load the model that the adapter names."""
    directory, name = saved_model
    tiny("gpt2", "cpu").save_pretrained(directory)
    adapter = {"base_model_name_or_path": "another/model", "peft_type": "LORA"}
    (directory / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(UnsupportedModel, match=r"an adapter \(adapter_config.json\)"):
        load_checkpoint(name(), torch.float32)


@pytest.mark.parametrize("inside", [False, True])
def test_quantized_checkpoint_is_rejected(tmp_path: Path, inside: bool) -> None:
    tiny("gpt2", "cpu").save_pretrained(tmp_path)
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    more = {"text_config": quantized} if inside else quantized
    edit(tmp_path / "config.json", lambda config: config.update(more))
    with pytest.raises(UnsupportedModel, match=r"it is quantized \(quantization_config\)"):
        load_checkpoint(str(tmp_path), torch.float32)
