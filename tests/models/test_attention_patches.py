"""Models with patched attention, compared with their own forward pass."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from roseinfer import AppendPolicy, KVBlockManager, UnsupportedModel
from roseinfer.engine.runner import SequenceRunner
from roseinfer.kv.sequence import CachedSequence
from roseinfer.models import (
    attention_patches,
)
from roseinfer.models.attention_patches import alibi_slopes
from roseinfer.models.causal import CausalModel
from roseinfer.models.tiny import draw_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

POSITIONS = 64
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
_GPTJ: dict[str, Any] = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
}


def _falcon(**kind: Any) -> Any:
    return transformers.FalconConfig(**SHAPE | kind)


FAMILIES: dict[str, Callable[[], Any]] = {
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=97, hidden_size=48, n_layer=2, n_head=6, seq_length=POSITIONS
    ),
    "bloom, normalized residual": lambda: transformers.BloomConfig(
        vocab_size=97,
        hidden_size=48,
        n_layer=2,
        n_head=3,
        apply_residual_connection_post_layernorm=True,
    ),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=97, d_model=48, n_layers=2, n_heads=6, max_seq_len=POSITIONS
    ),
    "mpt, clipped": lambda: transformers.MptConfig(
        vocab_size=97,
        d_model=48,
        n_layers=2,
        n_heads=4,
        max_seq_len=POSITIONS,
        attn_config={"clip_qkv": 1.0, "softmax_scale": 0.4},
    ),
    "falcon": _falcon,
    "falcon, grouped keys": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon, alibi": lambda: _falcon(alibi=True),
    "falcon, alibi, key per head": lambda: _falcon(
        alibi=True, multi_query=False, parallel_attn=False, bias=True
    ),
    "gpt-j": lambda: transformers.GPTJConfig(**_GPTJ, rotary_dim=6),
    "codegen": lambda: transformers.CodeGenConfig(**_GPTJ, rotary_dim=6),
    "gpt-neo": lambda: transformers.GPTNeoConfig(
        vocab_size=97,
        hidden_size=48,
        num_layers=2,
        num_heads=4,
        window_size=5,
        max_position_embeddings=POSITIONS,
        attention_types=[[["global", "local"], 1]],
    ),
    "stablelm": lambda: transformers.StableLmConfig(
        **SHAPE | {"hidden_size": 64}, intermediate_size=64, num_key_value_heads=2
    ),
    "nemotron": lambda: transformers.NemotronConfig(
        **SHAPE, intermediate_size=64, num_key_value_heads=2, head_dim=12
    ),
    "biogpt": lambda: transformers.BioGptConfig(**SHAPE, intermediate_size=64),
}
"""Configs by name. The last three use transformers' interface, but drop unknown arguments."""


def build(family: str, device: str = "cpu") -> Any:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    draw_weights(model, 3)
    return model.eval().to(device)


def runner_for(model: Any, device: str, attention: str = "reference") -> SequenceRunner:
    causal = CausalModel(model)
    shape = causal.shape
    kv = KVBlockManager(
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        4,
        60,
        device,
        causal.dtype,
        AppendPolicy(triton=False),
        layers_per_group=shape.num_layers,
    )
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    return SequenceRunner(causal, kv, attention=attention)


STEPS = [(9, 1), (1, 7), (1, 1), (12, 2), (1, 1), (5, 1), (1, 8), (1, 1), (1, 1)]
"""Tokens that two sequences store in each step."""
TEXTS = [
    torch.randint(0, 97, (sum(counts),), generator=torch.Generator().manual_seed(at)).tolist()
    for at, counts in enumerate(zip(*STEPS, strict=True))
]


@torch.no_grad()
def own_logits(model: Any, device: str) -> list[torch.Tensor]:
    """Return the model's own logits of each position of both texts."""
    return [
        model(torch.tensor([text], device=device), use_cache=False).logits[0].float()
        for text in TEXTS
    ]


def stepwise_logits(runner: SequenceRunner) -> list[list[torch.Tensor]]:
    """Return the logits of each text after every step."""
    sessions = [CachedSequence([[]], list(text)) for text in TEXTS]
    rows = [list(runner.extend(sessions, list(counts)).float()) for counts in STEPS]
    return [list(rows_of_text) for rows_of_text in zip(*rows, strict=True)]


def largest_difference(actual: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> float:
    """Return the largest difference of logits."""
    largest = 0.0
    for text, (rows, expected_rows) in enumerate(zip(actual, expected, strict=True)):
        end = 0
        for counts, row in zip(STEPS, rows, strict=True):
            end += counts[text]
            largest = max(largest, float((row - expected_rows[end - 1]).abs().max()))
    return largest


@pytest.mark.sampled_cases
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_model_matches_its_own_forward_pass(device: str, family: str) -> None:
    model = build(family, device)
    expected = own_logits(model, device)
    assert largest_difference(stepwise_logits(runner_for(model, device)), expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES if torch.cuda.is_available() else ["bloom"])
def test_kernels_match_the_models_own_forward_pass(device: str, family: str) -> None:
    model = build(family, device)
    expected = own_logits(model, device)
    assert largest_difference(stepwise_logits(runner_for(model, device, "triton")), expected) < 1e-4


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon, alibi", "gpt-neo", "codegen"])
def test_bfloat16_is_as_accurate_as_transformers(device: str, family: str) -> None:
    rounded = build(family, device).to(torch.bfloat16)
    exact = own_logits(deepcopy(rounded).float(), device)
    transformers_error = max(
        float((one - other).abs().max())
        for one, other in zip(own_logits(rounded, device), exact, strict=True)
    )
    assert (
        largest_difference(stepwise_logits(runner_for(rounded, device)), exact)
        < 1.5 * transformers_error
    )


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 7, 8, 12, 16, 25, 32, 71, 112])
def test_alibi_slopes_match_transformers(heads: int) -> None:
    slopes = torch.tensor(alibi_slopes(heads))
    of_bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    of_mpt = build_mpt_alibi_tensor(heads, 2)[:, 0]
    torch.testing.assert_close(slopes, of_bloom)
    torch.testing.assert_close(slopes, of_mpt[:, 1] - of_mpt[:, 0])


def test_falcon_rounds_alibi_slopes_that_are_not_powers_of_two() -> None:
    """Falcon also rounds their products with positions, and the cache knows no positions."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        _falcon(hidden_size=96, num_attention_heads=12, alibi=True)
    )
    draw_weights(model, 3)
    expected = own_logits(model.eval(), "cpu")
    largest = max(float(logits.abs().max()) for logits in expected)
    assert (
        1e-4
        < largest_difference(stepwise_logits(runner_for(model, "cpu")), expected)
        < 2**-8 * largest
    )


def test_falcon_that_adds_alibi_twice_is_rejected() -> None:
    """Transformers' eager attention does this if requested; the default does not."""
    model = build("falcon, alibi")
    model.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedModel, match="does not compute attention with scale"):
        CausalModel(model)


def _scaled(attend: Callable[..., Any]) -> Callable[..., Any]:
    def sharper_attention(
        module: Any, query: Any, key: Any, value: Any, scaling: float, **options: Any
    ) -> Any:
        return attend(module, query, key, value, 1.2 * scaling, **options)

    return sharper_attention


@pytest.mark.parametrize(
    ("family", "patches"),
    [
        ("bloom", attention_patches),
        ("mpt", attention_patches),
        ("falcon", attention_patches),
        ("falcon, alibi", attention_patches),
        ("gpt-j", attention_patches),
        ("codegen", attention_patches),
        ("gpt-neo", attention_patches),
    ],
)
def test_wrong_attention_patch_is_detected(
    monkeypatch: pytest.MonkeyPatch, family: str, patches: ModuleType
) -> None:
    scaled = _scaled(patches.attend_through_interface)
    monkeypatch.setattr(patches, "attend_through_interface", scaled)
    with pytest.raises(UnsupportedModel, match="does not compute attention with scale"):
        CausalModel(build(family))


@pytest.mark.parametrize(
    ("family", "patches"), [("bloom", attention_patches), ("mpt", attention_patches)]
)
def test_wrong_alibi_slopes_are_detected(
    monkeypatch: pytest.MonkeyPatch, family: str, patches: ModuleType
) -> None:
    monkeypatch.setattr(patches, "alibi_slopes", lambda heads: alibi_slopes(heads)[::-1])
    with pytest.raises(UnsupportedModel, match="does not compute attention with scale, slopes"):
        CausalModel(build(family))


@pytest.mark.parametrize("family", ["bloom", "mpt", "gpt-neo"])
def test_patched_model_can_be_patched_again_and_copied(family: str) -> None:
    """The copy computes with weights of its own."""
    model = build(family)
    CausalModel(model)
    copy = deepcopy(model)
    expected = own_logits(build(family), "cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert largest_difference(stepwise_logits(runner_for(copy, "cpu")), expected) < 1e-4


@pytest.mark.parametrize(("length", "window"), [(64, 5), (6, 5), (5, None)])
def test_local_layers_have_windows(length: int, window: int | None) -> None:
    model = CausalModel(build("gpt-neo"), max_length=length)
    assert [layer.window for layer in model.traits] == [None, window]


@pytest.mark.parametrize(
    ("family", "heads"),
    [
        ("falcon", 1),
        ("falcon, grouped keys", 2),
        ("falcon, alibi, key per head", 4),
        ("bloom", 6),
    ],
)
def test_shared_keys_are_stored_once(family: str, heads: int) -> None:
    assert CausalModel(build(family)).shape.num_kv_heads == heads


def test_max_length_of_models_without_a_number_of_positions() -> None:
    model = build("bloom, normalized residual")
    assert CausalModel(model).shape.max_length == 2048
    assert CausalModel(model, max_length=4096).shape.max_length == 4096
    assert CausalModel(build("bloom")).shape.max_length == POSITIONS
    with pytest.raises(UnsupportedModel, match=f"has {POSITIONS} positions"):
        CausalModel(build("mpt"), max_length=POSITIONS + 1)
