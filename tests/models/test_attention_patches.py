"""Models that reach attention by a way of their own agree with their own plain forward pass."""

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
    "bloom whose residual is normalised": lambda: transformers.BloomConfig(
        vocab_size=97,
        hidden_size=48,
        n_layer=2,
        n_head=3,
        apply_residual_connection_post_layernorm=True,
    ),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=97, d_model=48, n_layers=2, n_heads=6, max_seq_len=POSITIONS
    ),
    "mpt that clips": lambda: transformers.MptConfig(
        vocab_size=97,
        d_model=48,
        n_layers=2,
        n_heads=4,
        max_seq_len=POSITIONS,
        attn_config={"clip_qkv": 1.0, "softmax_scale": 0.4},
    ),
    "falcon": _falcon,
    "falcon whose heads share keys": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon with alibi": lambda: _falcon(alibi=True),
    "falcon with alibi and a key for each head": lambda: _falcon(
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
"""The last three go through transformers' interface, but do not hand on what they do not know."""


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
"""How many tokens two sequences store in each step."""
TEXTS = [
    torch.randint(0, 97, (sum(counts),), generator=torch.Generator().manual_seed(at)).tolist()
    for at, counts in enumerate(zip(*STEPS, strict=True))
]


@torch.no_grad()
def own_logits(model: Any, device: str) -> list[torch.Tensor]:
    """Return the logits of each position of both texts, by the model alone."""
    return [
        model(torch.tensor([text], device=device), use_cache=False).logits[0].float()
        for text in TEXTS
    ]


def in_steps(runner: SequenceRunner) -> list[list[torch.Tensor]]:
    """Return the logits of each text behind every step."""
    sessions = [CachedSequence([[]], list(text)) for text in TEXTS]
    rows = [list(runner.extend(sessions, list(counts)).float()) for counts in STEPS]
    return [list(of_text) for of_text in zip(*rows, strict=True)]


def apart(ours: list[list[torch.Tensor]], theirs: list[torch.Tensor]) -> float:
    """Return how far the logits are from each other at most."""
    largest = 0.0
    for text, (rows, wanted) in enumerate(zip(ours, theirs, strict=True)):
        end = 0
        for counts, row in zip(STEPS, rows, strict=True):
            end += counts[text]
            largest = max(largest, float((row - wanted[end - 1]).abs().max()))
    return largest


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_its_own_forward_pass(device: str, family: str) -> None:
    model = build(family, device)
    wanted = own_logits(model, device)
    assert apart(in_steps(runner_for(model, device)), wanted) < 1e-4


@pytest.mark.parametrize("family", FAMILIES if torch.cuda.is_available() else ["bloom"])
def test_kernels_agree_too(device: str, family: str) -> None:
    model = build(family, device)
    wanted = own_logits(model, device)
    assert apart(in_steps(runner_for(model, device, "triton")), wanted) < 1e-4


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon with alibi", "gpt-neo", "codegen"])
def test_bfloat16_is_as_near_to_the_truth(device: str, family: str) -> None:
    rounded = build(family, device).to(torch.bfloat16)
    truth = own_logits(deepcopy(rounded).float(), device)
    theirs = max(
        float((one - other).abs().max())
        for one, other in zip(own_logits(rounded, device), truth, strict=True)
    )
    assert apart(in_steps(runner_for(rounded, device)), truth) < 1.5 * theirs


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 7, 8, 12, 16, 25, 32, 71, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    slopes = torch.tensor(alibi_slopes(heads))
    of_bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    of_mpt = build_mpt_alibi_tensor(heads, 2)[:, 0]
    torch.testing.assert_close(slopes, of_bloom)
    torch.testing.assert_close(slopes, of_mpt[:, 1] - of_mpt[:, 0])


def test_falcon_rounds_slopes_that_are_no_powers_of_two() -> None:
    """It rounds their products with positions too, and the cache knows of no positions."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        _falcon(hidden_size=96, num_attention_heads=12, alibi=True)
    )
    draw_weights(model, 3)
    wanted = own_logits(model.eval(), "cpu")
    largest = max(float(logits.abs().max()) for logits in wanted)
    assert 1e-4 < apart(in_steps(runner_for(model, "cpu")), wanted) < 2**-8 * largest


def test_a_falcon_that_adds_alibi_twice() -> None:
    """Transformers' eager attention does, if one asks for it; what it loads by itself does not."""
    model = build("falcon with alibi")
    model.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedModel, match="does not compute attention with scale"):
        CausalModel(model)


def _scaled(attend: Callable[..., Any]) -> Callable[..., Any]:
    def sharper(module: Any, query: Any, key: Any, value: Any, scaling: float, **asked: Any) -> Any:
        return attend(module, query, key, value, 1.2 * scaling, **asked)

    return sharper


@pytest.mark.parametrize(
    ("family", "door"),
    [
        ("bloom", attention_patches),
        ("mpt", attention_patches),
        ("falcon", attention_patches),
        ("falcon with alibi", attention_patches),
        ("gpt-j", attention_patches),
        ("codegen", attention_patches),
        ("gpt-neo", attention_patches),
    ],
)
def test_a_door_that_computes_something_else_is_found_out(
    monkeypatch: pytest.MonkeyPatch, family: str, door: ModuleType
) -> None:
    scaled = _scaled(door.attend_through_interface)
    monkeypatch.setattr(door, "attend_through_interface", scaled)
    with pytest.raises(UnsupportedModel, match="does not compute attention with scale"):
        CausalModel(build(family))


@pytest.mark.parametrize(
    ("family", "door"), [("bloom", attention_patches), ("mpt", attention_patches)]
)
def test_slopes_of_something_else_are_found_out(
    monkeypatch: pytest.MonkeyPatch, family: str, door: ModuleType
) -> None:
    monkeypatch.setattr(door, "alibi_slopes", lambda heads: alibi_slopes(heads)[::-1])
    with pytest.raises(UnsupportedModel, match="does not compute attention with scale, slopes"):
        CausalModel(build(family))


@pytest.mark.parametrize("family", ["bloom", "mpt", "gpt-neo"])
def test_a_model_can_be_taken_over_again_and_copied(family: str) -> None:
    """The copy computes with weights of its own."""
    model = build(family)
    CausalModel(model)
    copy = deepcopy(model)
    wanted = own_logits(build(family), "cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert apart(in_steps(runner_for(copy, "cpu")), wanted) < 1e-4


@pytest.mark.parametrize(("length", "window"), [(64, 5), (6, 5), (5, None)])
def test_windows_of_local_layers(length: int, window: int | None) -> None:
    model = CausalModel(build("gpt-neo"), max_length=length)
    assert [layer.window for layer in model.traits] == [None, window]


@pytest.mark.parametrize(
    ("family", "heads"),
    [
        ("falcon", 1),
        ("falcon whose heads share keys", 2),
        ("falcon with alibi and a key for each head", 4),
        ("bloom", 6),
    ],
)
def test_no_key_is_stored_twice(family: str, heads: int) -> None:
    assert CausalModel(build(family)).shape.num_kv_heads == heads


def test_a_model_that_does_not_say_how_many_positions_it_has() -> None:
    model = build("bloom whose residual is normalised")
    assert CausalModel(model).shape.max_length == 2048
    assert CausalModel(model, max_length=4096).shape.max_length == 4096
    assert CausalModel(build("bloom")).shape.max_length == POSITIONS
    with pytest.raises(UnsupportedModel, match=f"has {POSITIONS} positions"):
        CausalModel(build("mpt"), max_length=POSITIONS + 1)
