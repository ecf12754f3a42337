"""Checks at load: models that the engine would compute wrongly are rejected."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from roseinfer import LLM, SamplingParams, UnsupportedModel
from roseinfer.models.attention_patches import CURRENT_ATTENTION
from roseinfer.models.causal import _UNSUPPORTED_SETTINGS, CausalModel, attend
from roseinfer.models.loading import warn_of_small_model
from tests.models.families import VOCABULARY, scale_weights_up

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_SHORT, _LONG = [1.0, 1.1, 1.2, 1.3], [2.0, 3.0, 4.0, 5.0]


def scaling(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def longrope(long: list[float]) -> dict[str, Any]:
    factors = {"short_factor": _SHORT, "long_factor": long}
    return scaling("longrope", original_max_position_embeddings=16, factor=4.0, **factors)


def build(config: Any) -> Any:
    torch.manual_seed(1)
    return scale_weights_up(transformers.AutoModelForCausalLM.from_config(config))


PROMPTS = [[5, 6, 7], [40, 41], [5, 6, 9, 60]]


def assert_matches_transformers(model: Any, length: int, **options: Any) -> None:
    """Compare requests served together with forward passes of the model, each alone.

    The first prompt is as long as possible.
    """
    alone = deepcopy(model)
    alone.set_attn_implementation("eager")
    llm = LLM(model, device="cpu", block_size=4, kv_cache_tokens=400, **options)
    prompts = [[at % VOCABULARY for at in range(3, length - 1)], *PROMPTS]
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, progress=False), strict=True):
        tokens = list(prompt)
        assert output.token_ids
        for token in output.token_ids:
            with torch.no_grad():
                logits = alone(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            assert token == int(logits.argmax())
            tokens.append(token)


LONGROPE = {
    "phi3": lambda: transformers.Phi3Config(
        **SHAPE, **longrope(_LONG), original_max_position_embeddings=16
    ),
    "llama": lambda: transformers.LlamaConfig(**SHAPE, **longrope(_LONG)),
}


@pytest.mark.parametrize("family", LONGROPE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_longrope_is_rejected_beyond_its_short_length(family: str, dtype: torch.dtype) -> None:
    model = build(LONGROPE[family]()).to(dtype)
    with pytest.raises(UnsupportedModel, match=r"\(longrope\).* max_length=16 or less"):
        CausalModel(model)
    with pytest.raises(UnsupportedModel, match=r"\(longrope\).* max_length=16 or less"):
        CausalModel(model, max_length=17)
    assert CausalModel(model, max_length=16).shape.max_length == 16


@pytest.mark.parametrize("family", LONGROPE)
def test_longrope_is_served_within_its_short_length(family: str) -> None:
    model = build(LONGROPE[family]())
    with pytest.raises(UnsupportedModel, match="max_length=16"):
        CausalModel(model)  # its check of long requests leaves no state
    assert_matches_transformers(model, 16, max_length=16)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "rotation",
    [
        longrope(_SHORT),
        scaling("dynamic", factor=2.0),
        scaling("linear", factor=2.0),
        scaling("yarn", factor=2.0, original_max_position_embeddings=32),
    ],
    ids=["longrope of equal factors", "dynamic", "linear", "yarn"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_rope_scalings_are_served(rotation: Any, dtype: torch.dtype) -> None:
    model = build(transformers.LlamaConfig(**SHAPE, **rotation))
    CausalModel(deepcopy(model).to(dtype))
    assert_matches_transformers(model, 64)


def test_undeclared_dynamic_rope_is_rejected() -> None:
    """The dynamic scaling begins within the positions in use."""
    model = build(transformers.LlamaConfig(**SHAPE, **scaling("dynamic", factor=2.0)))
    rotary = model.model.rotary_emb
    rotary.max_seq_len_cached = rotary.original_max_seq_len = 32
    rotary.config = deepcopy(rotary.config)
    rotary.config.max_position_embeddings = 32
    with pytest.raises(UnsupportedModel, match="differently for other tokens in its step"):
        CausalModel(model)


@pytest.mark.parametrize("pad", [0, 1, 50])
@pytest.mark.parametrize(
    "config",
    [transformers.RobertaConfig, transformers.CamembertConfig, transformers.XLMRobertaConfig],
)
def test_positions_with_an_offset_are_rejected(config: Any, pad: int) -> None:
    model = build(config(**SHAPE | {"pad_token_id": pad}, is_decoder=True))
    with pytest.raises(UnsupportedModel, match="does not count positions from 0"):
        CausalModel(model)


def test_positions_that_skip_padding_are_rejected() -> None:
    """The model counts from 0 and skips padding tokens."""
    model = build(transformers.LlamaConfig(**SHAPE | {"pad_token_id": 7}))
    forward = model.forward

    def count_positions(input_ids: Any, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is None:
            position_ids = ((input_ids != 7).cumsum(-1) - 1).clamp(min=0)
        return forward(input_ids=input_ids, position_ids=position_ids, **more)

    model.forward = count_positions
    with pytest.raises(UnsupportedModel, match="does not count positions from 0"):
        CausalModel(model)


def test_mixing_of_neighbouring_tokens_is_rejected() -> None:
    model = build(transformers.LlamaConfig(**SHAPE))
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + x.roll(1, dims=1))
    with pytest.raises(UnsupportedModel, match="differently for other tokens in its step"):
        CausalModel(model)


def test_values_wider_than_keys_are_rejected() -> None:
    model = build(transformers.LlamaConfig(**SHAPE))
    attention = model.model.layers[0].self_attn
    attention.v_proj = torch.nn.Linear(32, 64)
    with pytest.raises(UnsupportedModel, match="has values of 8 heads of 8 and keys"):
        CausalModel(model)


def test_sparse_attention_is_rejected() -> None:
    config = transformers.MiniMaxM3VLTextConfig(
        **SHAPE,
        head_dim=8,
        layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "dense"],
        index_head_dim=8,
        index_n_heads=2,
        index_topk_blocks=1,
        index_block_size=4,
        index_local_blocks=1,
    )
    with pytest.raises(UnsupportedModel, match="attention to the tokens that an index selects"):
        CausalModel(build(config))


def test_unknown_attention_arguments_are_rejected_at_load() -> None:
    model = build(transformers.LlamaConfig(**SHAPE))
    forward = model.forward
    model.forward = lambda **arguments: forward(block_indices=torch.zeros(1), **arguments)
    with pytest.raises(UnsupportedModel, match="LlamaAttention passes block_ind"):
        CausalModel(model)


class _Zeros:
    """Attention of an engine that returns zeros."""

    def store_and_attend(
        self, layer: int, query: torch.Tensor, key: Any, value: Any
    ) -> torch.Tensor:
        del layer, key, value
        return torch.zeros_like(query)


@pytest.fixture
def engine_running() -> Iterator[None]:
    before = CURRENT_ATTENTION.set(_Zeros())
    yield
    CURRENT_ATTENTION.reset(before)


@pytest.mark.parametrize(
    "arguments",
    [
        {name: torch.ones(1)}
        for name in ("block_indices", "indices", "sinks", "position_bias", "head_mask")
    ]
    + [{"is_causal": False}, {"dropout": 0.1}, {"never_heard_of": 1}],
    ids=lambda arguments: next(iter(arguments)),
)
@pytest.mark.usefixtures("engine_running")
def test_attention_argument_is_rejected_by_name(arguments: dict[str, Any]) -> None:
    module: Any = SimpleNamespace(layer_idx=0)
    tensor = torch.ones(1, 2, 3, 4)
    allowed: dict[str, Any] = {
        "is_causal": True,
        "dropout": 0.0,
        "use_cache": False,
    }
    attend_with: Any = partial(attend, module, tensor, tensor, tensor, None)
    attend_with(**allowed)
    with pytest.raises(UnsupportedModel, match=next(iter(arguments))):
        attend_with(**arguments)


@pytest.mark.usefixtures("engine_running")
def test_attention_mask_is_rejected() -> None:
    module: Any = SimpleNamespace(layer_idx=0)
    tensor = torch.ones(1, 2, 3, 4)
    with pytest.raises(UnsupportedModel, match="passes a mask to its attention"):
        attend(module, tensor, tensor, tensor, torch.ones(1))


def test_attention_outside_of_an_engine_is_rejected() -> None:
    model = CausalModel(build(transformers.LlamaConfig(**SHAPE)))._model
    with pytest.raises(UnsupportedModel, match="belongs to an engine, which runs it now"):
        model(torch.tensor([[1, 2]]))


def llama4(**more: Any) -> Any:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
    return transformers.Llama4TextConfig(
        **SHAPE, num_key_value_heads=2, head_dim=8, attention_chunk_size=16, **experts, **more
    )


def test_positions_taken_from_rows_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 takes rows of a step for positions, but only far beyond the positions of a check."""
    with pytest.raises(UnsupportedModel, match="queries scaled by their position in a step"):
        CausalModel(build(llama4(no_rope_layers=[0, 0])), max_length=16)
    monkeypatch.delitem(_UNSUPPORTED_SETTINGS, "attn_temperature_tuning")
    with pytest.raises(UnsupportedModel, match="does not count positions from 0"):
        CausalModel(build(llama4(no_rope_layers=[0, 0], floor_scale=1)), max_length=16)


def test_chunked_attention_is_served_within_one_chunk() -> None:
    model = build(llama4(attn_temperature_tuning=False))
    with pytest.raises(UnsupportedModel, match=r"in chunks of 16 tokens.* max_length=16"):
        CausalModel(model)
    assert_matches_transformers(model, 16, max_length=16)


@pytest.mark.parametrize(("length", "window"), [(64, 12), (13, 12), (12, None), (8, None)])
def test_window_that_covers_max_length_is_dropped(length: int, window: Any) -> None:
    model = build(transformers.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=12))
    assert {layer.window for layer in CausalModel(model, max_length=length).traits} == {window}


def test_layers_have_their_traits() -> None:
    """Gemma 2 has a window in every other layer, and gpt-oss has sinks in all of them."""
    shape = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9}
    gemma = CausalModel(build(transformers.Gemma2Config(**shape, attn_logit_softcapping=3.0)))
    assert [(layer.window, layer.softcap) for layer in gemma.traits] == [(9, 3.0), (None, 3.0)]
    config = transformers.GptOssConfig(**shape, num_local_experts=2, num_experts_per_tok=1)
    model = build(config)
    for layer, traits in zip(model.model.layers, CausalModel(model).traits, strict=True):
        assert traits.sinks is not None
        assert torch.equal(traits.sinks, layer.self_attn.sinks)


def test_other_attention_arithmetic_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own attention is computed for a few tokens, and compared."""
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def sharper_attention(module: Any, query: Any, *args: Any, **more: Any) -> Any:
        return own(module, query * 1.5, *args, **more)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", sharper_attention)
    with pytest.raises(UnsupportedModel, match="does not compute attention with scale"):
        CausalModel(build(transformers.LlamaConfig(**SHAPE)))


def test_large_scores_in_half_precision_pass_the_check() -> None:
    """Rounded scores of about a hundred differ widely, and neither side is wrong."""
    config = transformers.LlamaConfig(**{**SHAPE, "hidden_size": 128, "num_hidden_layers": 12})
    model = build(config).to(torch.bfloat16)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=4)
        torch.nn.init.normal_(layer.self_attn.k_proj.weight, std=4)
    assert [layer.trait_names for layer in CausalModel(model).traits] == [{"scale"}] * 12


def test_undeclared_window_is_detected() -> None:
    """The window is detected by the mask, without a setting."""
    model = build(transformers.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=12))
    inner = model.model
    forward = inner.forward

    def forward_with_window(*args: Any, **more: Any) -> Any:
        inner.config.sliding_window = 12
        output = forward(*args, **more)
        inner.config.sliding_window = None
        return output

    inner.config.sliding_window = None
    inner.forward = forward_with_window
    assert [layer.window for layer in CausalModel(model).traits] == [12, 12]


def test_unused_window_is_ignored() -> None:
    config = transformers.Qwen2Config(
        **SHAPE, num_key_value_heads=2, sliding_window=8, use_sliding_window=False
    )
    config.sliding_window = 8
    assert_matches_transformers(build(config), 64)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda _b, _h, query, key: (key == query) | (key < query) & (key % 2 == 0), "skips some"),
        (lambda _b, _h, query, _key: query >= 0, "later tokens"),
        (lambda _b, _h, query, key: key < query, "the token itself"),
        (lambda _b, _h, query, key: (key <= query) & (key >= query // 2), "in chunks of"),
    ],
    ids=["every other token", "bidirectional", "excluding itself", "half of the context"],
)
def test_unsupported_masks_are_rejected(
    monkeypatch: pytest.MonkeyPatch, mask: Any, message: str
) -> None:
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "causal_mask_function", mask)
    with pytest.raises(UnsupportedModel, match=message):
        CausalModel(build(transformers.LlamaConfig(**SHAPE)))


def test_keys_of_an_undeclared_shape_are_rejected() -> None:
    model = build(transformers.LlamaConfig(**SHAPE, num_key_value_heads=2))
    model.config.num_key_value_heads = 4
    with pytest.raises(UnsupportedModel, match=r"with 4 KV heads of 8, .* keys of \[\(2, 8\)\]"):
        CausalModel(model)


def test_config_without_a_shape_is_rejected() -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(UnsupportedModel, match="has no readable shape in its config"):
        CausalModel(build(config))


@pytest.mark.parametrize(
    ("weights", "rank", "device", "warned"),
    [
        (600_000_000, 0, "cuda", True),
        (600_000_000, 1, "cuda", False),
        (600_000_000, 0, "cpu", False),
        (4_000_000_000, 0, "cuda", False),
    ],
)
def test_several_gpus_for_a_small_model_are_warned_of(
    weights: int, rank: int, device: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = SimpleNamespace(num_weights=weights)
    ranks: Any = SimpleNamespace(rank=rank, size=2, device=torch.device(device))
    warn_of_small_model(model, ranks)
    assert ("a model of 1.2 billion weights" in caplog.text) == warned
    assert bool(caplog.text) == warned
