"""New weights in a running ``LLM``: it continues as one that was made with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_roseinfer.targets import engine_models
from roseinfer import LLM, BadArgument, SamplingParams, TooBusy
from tests.models import families

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 4, 5, 6]]
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=True)
MODELS = ("gpt2", "llama", "qwen2", "gemma2", "mixtral")


def network(name: str, device: str) -> Any:
    if name in families.CONFIGS:
        return families.tiny(name, device)
    return engine_models.network(name, device)


def new_llm(model: Any, device: str, **config: Any) -> LLM:
    return LLM(model, device=device, block_size=4, kv_cache_tokens=256, **config)


def texts(llm: LLM) -> list[tuple[list[int], list[float]]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    return [(each.token_ids, [round(p, 3) for p in each.logprobs or ()]) for each in outputs]


def other_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return new values for all parameters of a model."""
    rng = torch.Generator().manual_seed(8)
    return {
        name: weight.detach().cpu() + 0.2 * torch.randn(weight.shape, generator=rng)
        for name, weight in model.named_parameters()
    }


def with_weights(name: str, values: Mapping[str, torch.Tensor], device: str) -> Any:
    model = network(name, device)
    model.load_state_dict(dict(values), strict=False)
    return model


@pytest.mark.sampled_cases
@pytest.mark.parametrize("config", [{}, {"fused_model": True}, {"pad_head": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_new_weights_serve_as_in_a_new_llm(name: str, config: dict[str, bool], device: str) -> None:
    """The prompts were stored under the old weights, and must not be found."""
    llm = new_llm(network(name, device), device, **config)
    values = other_weights(network(name, device))
    before = texts(llm)
    llm.update_weights(values)
    after = texts(llm)
    assert before != after == texts(new_llm(with_weights(name, values, device), device, **config))


def test_a_single_weight_can_be_replaced(device: str) -> None:
    llm = new_llm(network("llama", device), device)
    name, value = next(iter(other_weights(network("llama", device)).items()))
    before = texts(llm)
    llm.update_weights({name: value})
    assert texts(llm) != before


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weigth", torch.ones(48), "no weight 'model.norm.weigth'; did you mean "),
        ("model.norm.weight", torch.ones(49), r"must be a tensor of shape \[48\], not \[49\]"),
        ("model.norm.weight", [1.0] * 48, r"must be a tensor of shape \[48\], not \[1.0"),
    ],
)
def test_bad_values_change_nothing(name: str, value: Any, message: str, device: str) -> None:
    llm = new_llm(network("llama", device), device)
    before = texts(llm)
    values = other_weights(network("llama", device)) | {name: value}
    with pytest.raises(BadArgument, match=message):
        llm.update_weights(values)
    assert texts(llm) == before


def test_open_stream_refuses_new_weights(device: str) -> None:
    llm = new_llm(network("llama", device), device)
    right = texts(llm)[0]
    stream = llm.stream(PROMPTS[0], PARAMS)
    tokens = [next(stream).token_id]
    with pytest.raises(TooBusy, match="1 requests are unfinished"):
        llm.update_weights(other_weights(network("llama", device)))
    assert tokens + [update.token_id for update in stream] == right[0]
