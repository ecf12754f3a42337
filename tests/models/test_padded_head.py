"""LM heads padded to a multiple of a tile."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import transformers

from roseinfer import LLM, EnginePath, SamplingParams
from roseinfer.config import EngineConfig
from roseinfer.models.loading import PaddedHead, load, pad_head


def gpt2(vocabulary: int) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_embd=16, n_layer=1, n_head=2, n_positions=32
    )
    return transformers.GPT2LMHeadModel(config).eval()


IDS = torch.tensor([[1, 5, 250, 30]])


@torch.inference_mode()
def test_padded_head_computes_the_same_logits(device: str) -> None:
    plain = gpt2(257).to(device)
    padded = deepcopy(plain)
    pad_head(padded)
    assert isinstance(padded.get_output_embeddings(), PaddedHead)
    ids = IDS.to(device)
    actual, expected = padded(ids).logits, plain(ids).logits
    assert actual.shape == expected.shape == (1, 4, 257)
    torch.testing.assert_close(actual, expected)


def test_padded_rows_are_aligned() -> None:
    model = gpt2(257)
    pad_head(model)
    assert model(IDS).logits.stride(1) == 320


def test_tied_embeddings_still_share_memory() -> None:
    model = gpt2(257)
    pad_head(model)
    head = model.get_output_embeddings()
    assert model.get_input_embeddings().weight.data_ptr() == head._weight.data_ptr()


def test_bias_is_padded() -> None:
    torch.manual_seed(1)
    head = torch.nn.Linear(16, 99)
    x = torch.randn(3, 16)
    expected = head(x)
    torch.testing.assert_close(PaddedHead(head)(x), expected)


@pytest.mark.parametrize("vocabulary", [256, 264])
def test_aligned_head_is_unchanged(vocabulary: int) -> None:
    model = gpt2(vocabulary)
    head = model.get_output_embeddings()
    pad_head(model)
    assert model.get_output_embeddings() is head


@pytest.mark.parametrize("setting", [None, True, False])
def test_head_is_padded_by_setting_or_on_a_gpu(device: str, setting: bool | None) -> None:
    config = EngineConfig(fused_model=False, pad_head=setting, kv_cache_tokens=64)
    model = load(gpt2(257), config, device=device).model
    padded = isinstance(model._model.get_output_embeddings(), PaddedHead)
    assert padded == (device != "cpu" if setting is None else setting)
    assert (EnginePath.PADDED_LM_HEAD in model.paths) == padded


@pytest.mark.parametrize("resident", [True, False])
def test_forward_passes_with_a_padded_head_are_counted(device: str, resident: bool) -> None:
    llm = LLM(
        gpt2(257),
        device=device,
        kv_cache_tokens=64,
        fused_model=False,
        pad_head=True,
        resident_decode=resident,
        cuda_graph=False if device == "cuda" else None,
    )
    llm.generate([[1, 2]], SamplingParams(max_new_tokens=4, ignore_eos=True), progress=False)
    assert llm.engine.path_counts[EnginePath.PADDED_LM_HEAD] == 4


def test_padded_model_runs_on_fused_kernels(device: str) -> None:
    """An engine leaves its model padded, and the next one may have other settings."""
    outputs = []
    model = gpt2(257).to(device)
    for fused in (False, True):
        llm = LLM(model, device=device, pad_head=not fused, fused_model=fused)
        paths = llm.engine.sequence_runner.model.paths
        assert (EnginePath.PADDED_LM_HEAD in paths) is not fused
        params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
        outputs += llm.generate([IDS[0].tolist()], params, progress=False)
    assert isinstance(model.get_output_embeddings(), PaddedHead)
    assert outputs[0].token_ids == outputs[1].token_ids
