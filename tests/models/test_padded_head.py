"""Heads of odd widths: wider inside, the same outside."""

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
def test_logits_are_those_of_the_model(device: str) -> None:
    plain = gpt2(257).to(device)
    padded = deepcopy(plain)
    pad_head(padded)
    assert isinstance(padded.get_output_embeddings(), PaddedHead)
    ids = IDS.to(device)
    found, want = padded(ids).logits, plain(ids).logits
    assert found.shape == want.shape == (1, 4, 257)
    torch.testing.assert_close(found, want)


def test_rows_begin_where_matrix_units_like_them() -> None:
    model = gpt2(257)
    pad_head(model)
    assert model(IDS).logits.stride(1) == 320


def test_tied_embeddings_stay_the_same_memory() -> None:
    model = gpt2(257)
    pad_head(model)
    head = model.get_output_embeddings()
    assert model.get_input_embeddings().weight.data_ptr() == head._weight.data_ptr()


def test_a_bias_is_padded_too() -> None:
    torch.manual_seed(1)
    head = torch.nn.Linear(16, 99)
    x = torch.randn(3, 16)
    want = head(x)
    torch.testing.assert_close(PaddedHead(head)(x), want)


@pytest.mark.parametrize("vocabulary", [256, 264])
def test_others_are_left_alone(vocabulary: int) -> None:
    model = gpt2(vocabulary)
    head = model.get_output_embeddings()
    pad_head(model)
    assert model.get_output_embeddings() is head


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_model_is_padded_where_it_is_asked_or_loaded_for_a_gpu(
    device: str, asked: bool | None
) -> None:
    config = EngineConfig(fused_model=False, pad_head=asked, kv_cache_tokens=64)
    model = load(gpt2(257), config, device=device).model
    padded = isinstance(model._model.get_output_embeddings(), PaddedHead)
    assert padded == (device != "cpu" if asked is None else asked)
    assert (EnginePath.PADDED_LM_HEAD in model.paths) == padded


@pytest.mark.parametrize("resident", [True, False])
def test_every_forward_pass_on_one_is_counted(device: str, resident: bool) -> None:
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


def test_a_model_that_was_padded_runs_on_fused_kernels_too(device: str) -> None:
    """An engine leaves its model padded, and the next one may have other switches."""
    texts = []
    model = gpt2(257).to(device)
    for fused in (False, True):
        llm = LLM(model, device=device, pad_head=not fused, fused_model=fused)
        paths = llm.engine.sequence_runner.model.paths
        assert (EnginePath.PADDED_LM_HEAD in paths) is not fused
        params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
        texts += llm.generate([IDS[0].tolist()], params, progress=False)
    assert isinstance(model.get_output_embeddings(), PaddedHead)
    assert texts[0].token_ids == texts[1].token_ids
