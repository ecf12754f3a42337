"""Models in directories: served as they were saved, and rejected by name if broken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import UnsupportedModel, tiny_gpt2
from tests.engine.continuations import (
    TEXTS,
    greedy,
    one,
    original,
    small_llm,
    text_of,
    transformers_continuation,
)
from tests.models.families import CONFIGS, tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Directory with the tiny model and its tokenizer."""
    saved = tiny_gpt2()
    saved.model.save_pretrained(tmp_path)
    saved.tokenizer.save_pretrained(tmp_path)
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("as_text", [True, False])
def test_directory_is_served_as_the_saved_model(
    device: str, checkpoint: Path, as_text: bool
) -> None:
    output = one(small_llm(device, str(checkpoint) if as_text else checkpoint), "Once", greedy())
    assert output.token_ids == transformers_continuation(device, "Once", 16)
    assert output.text == text_of(device, output.token_ids)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("family", CONFIGS)
def test_model_without_a_tokenizer_generates_token_ids(
    device: str, tmp_path: Path, family: str
) -> None:
    tiny(family, "cpu").save_pretrained(tmp_path)
    llm = small_llm(device, tmp_path)
    prompts: list[Any] = [[1, 2, 3], "text", [1, 2, 3]]
    params = [greedy(3, ignore_eos=True), greedy(3), greedy(3, stop=("x",))]
    outputs = llm.generate(prompts, params, progress=False)
    assert len(outputs[0].token_ids) == 3
    assert outputs[0].text is None
    missing = ["a text prompt needs a tokenizer", "stop strings need a tokenizer"]
    for rejected, message in zip(outputs[1:], missing, strict=True):
        assert rejected.finish_reason == "error"
        assert rejected.error is not None
        assert message in rejected.error
    first = next(llm.stream([1, 2, 3], greedy(3)))
    assert (first.token_id, first.text) == (outputs[0].token_ids[0], "")


def truncate(name: str, length: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes()[:length])

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def remove_a_weight(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    weights = load_file(path)
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def pickle_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save(tiny_gpt2().model.state_dict(), directory / "pytorch_model.bin")


def set_another_shape(directory: Path) -> None:
    edit(directory / "config.json", lambda config: config.update(n_embd=32))


def set_an_unknown_type(directory: Path) -> None:
    edit(directory / "config.json", lambda config: config.update(model_type="abacus"))


def set_one_layer_less(directory: Path) -> None:
    edit(directory / "config.json", lambda config: config.update(n_layer=1))


def set_config(**settings: Any) -> Callable[[Path], None]:
    return lambda directory: edit(directory / "config.json", lambda config: config.update(settings))


def store_int8_weights(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["transformer.h.1.mlp.c_fc.weight"] = torch.ones(64, 256, dtype=torch.int8)
    save_file(weights, path, metadata={"format": "pt"})


def point_to_weights(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (directory / "model.safetensors").write_text(pointer)


def store_list_as_generation_config(directory: Path) -> None:
    (directory / "generation_config.json").write_text("[]")


def remove_everything(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated weights": (truncate("model.safetensors", 100_000), "cannot be loaded"),
    "truncated header": (truncate("model.safetensors", 100), "cannot be loaded"),
    "empty weights": (truncate("model.safetensors", 0), "cannot be loaded"),
    "no weights": (remove("model.safetensors"), "cannot be loaded.*safetensors"),
    "pickled weights": (pickle_weights, "pickles are not read.*save_pretrained"),
    "git-lfs pointer": (point_to_weights, "model.safetensors is a pointer.* git lfs pull"),
    "int8 weights": (store_int8_weights, r"h.1.mlp.c_fc.weight is of type I8, without"),
    "extra layer": (
        set_one_layer_less,
        r"has \d+ weights of layers .* transformer.h.1.attn",
    ),
    "missing weight": (remove_a_weight, "lacks 1 weights, transformer.h.1.mlp.c_fc.weight among"),
    "wrong shape": (
        set_another_shape,
        r"has \d+ weights of other shapes than in its",
    ),
    "truncated generation config": (
        truncate("generation_config.json", 5),
        "config.json is not JSON",
    ),
    "generation config that is no object": (
        store_list_as_generation_config,
        "config.json is not a JSON object",
    ),
    "truncated config": (truncate("config.json", 30), "cannot be loaded.*config"),
    "no config": (remove("config.json"), "cannot be loaded"),
    "a billion layers": (
        set_config(n_layer=10**9),
        "config has n_layer=1000000000, .* at most 128",
    ),
    "a billion nested layers": (
        set_config(sub_config={"num_hidden_layers": 10**4000}),
        "config has num_hidden_layers=a whole number of .* bits",
    ),
    "a hundred layers": (set_config(n_layer=100), r"describes [\d,]+ numbers of weights, and"),
    "huge vocabulary": (
        set_config(vocab_size=2 << 30),
        r"describes [\d,]+ numbers of weights, and",
    ),
    "huge width": (set_config(n_embd=1 << 62), "cannot be loaded"),
    "unknown type": (set_an_unknown_type, "cannot be loaded.*abacus"),
    "truncated tokenizer": (truncate("tokenizer.json", 100), "tokenizer"),
    "no directory": (remove_everything, "cannot be loaded"),
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_broken_checkpoint_is_rejected_by_name(
    checkpoint: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(checkpoint)
    with pytest.raises(UnsupportedModel, match=f"(?s){message}") as rejected:
        small_llm("cpu", checkpoint)
    assert str(checkpoint) in str(rejected.value)


def set_eos_tokens(checkpoint: Path, generation: list[int], model: int, tokenizer: str) -> None:
    """Set EOS tokens in three files."""
    edit(
        checkpoint / "generation_config.json",
        lambda config: config.update(eos_token_id=generation),
    )
    edit(checkpoint / "config.json", lambda config: config.update(eos_token_id=model))
    edit(checkpoint / "tokenizer_config.json", lambda config: config.update(eos_token=tokenizer))


def first_positions(tokens: list[int]) -> list[int]:
    """Return the positions of tokens that occur there for the first time."""
    return [at for at, token in enumerate(tokens) if token not in tokens[:at]]


@pytest.mark.sampled_cases
@pytest.mark.parametrize("which", range(4))
def test_every_declared_eos_token_ends_a_completion(
    device: str, checkpoint: Path, which: int
) -> None:
    """The EOS tokens are two of a list, the model's own and the tokenizer's; one of them occurs."""
    (prompt, tokens, position) = next(
        (text, tokens, position)
        for text in [*TEXTS, *"bcdefgh"]
        for tokens in [transformers_continuation(device, text, 8)]
        for position in first_positions(tokens)
        if position > 1 and chr(tokens[position]).isalnum() and tokens[position] < 128
    )
    ends = [token for token in range(200, 240) if token not in tokens][:4]
    ends[which] = tokens[position]
    eos_text = original(device).tokenizer.convert_ids_to_tokens(ends[3])
    set_eos_tokens(checkpoint, ends[:2], ends[2], eos_text)
    llm = small_llm(device, checkpoint)
    output = one(llm, prompt, greedy(8))
    assert output.token_ids == tokens[: position + 1]
    assert output.finish_reason == "stop"
    assert output.text == text_of(device, tokens[:position])
    past_eos = one(llm, prompt, greedy(8, ignore_eos=True))
    assert (past_eos.token_ids, past_eos.finish_reason) == (tokens, "length")
