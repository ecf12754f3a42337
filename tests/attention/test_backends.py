"""Attention backends: lookup by name, rejection of unsupported traits, and extension."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from roseinfer import (
    AppendPolicy,
    AttentionPath,
    ConfigError,
    EngineConfig,
    KVBlockManager,
    UnsupportedModel,
)
from roseinfer.attention.backend import default_backend, find_backend
from roseinfer.kv.storage import IndexStaging
from roseinfer.layer_traits import LayerTraits
from tests.attention import sdpa_backend  # noqa: F401  (it registers itself)
from tests.engine.continuations import TEXTS, greedy, small_llm, transformers_continuation


@pytest.mark.parametrize("resident", [False, True])
def test_registered_backend_matches_transformers(device: str, resident: bool) -> None:
    """It serves prompts, chunks of them and decode steps, in slots or not."""
    llm = small_llm(
        device,
        attention_backend="sdpa",
        resident_decode=resident,
        cuda_graph=False if device == "cuda" else None,
        prefill_max_tokens=7,
    )
    for text, output in zip(TEXTS, llm.generate(TEXTS, greedy(), progress=False), strict=True):
        assert output.token_ids == transformers_continuation(device, text, 16)
    counts = llm.engine.path_counts
    assert counts["sdpa"] > 0
    assert not counts.keys() & {*AttentionPath}


@pytest.mark.parametrize(("alias", "name"), [(True, "triton"), (False, "reference")])
def test_paged_attention_is_an_alias(alias: bool, name: str) -> None:
    assert EngineConfig(paged_attention=alias).attention_backend == name
    both = EngineConfig(paged_attention=alias, attention_backend=name)
    assert both.attention_backend == name
    with pytest.raises(ConfigError, match=f"means attention_backend='{name}', and 'sdpa' was"):
        EngineConfig(paged_attention=alias, attention_backend="sdpa")


def test_default_backend_depends_on_the_device(device: str) -> None:
    assert EngineConfig().attention_backend is None
    assert default_backend(torch.device("cpu")) == "batched"
    if device == "cuda":
        assert default_backend(torch.device(device)) == "triton"


def test_unregistered_backend_is_rejected(device: str) -> None:
    with pytest.raises(ConfigError, match=r"'flash' is not registered.* batched, ref.*, .*triton"):
        small_llm(device, attention_backend="flash")
    with pytest.raises(ConfigError, match="attention_backend must be a name or None, not 3"):
        EngineConfig(attention_backend=3)  # type: ignore[arg-type]


def test_backend_that_cannot_run_is_rejected(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton: Any = find_backend("triton")
    monkeypatch.setattr(triton, "unusable_reason", classmethod(lambda _, __: "there is no Triton"))
    with pytest.raises(ConfigError, match="attention_backend='triton': there is no Triton"):
        small_llm(device, attention_backend="triton")
    assert default_backend(torch.device(device)) == "batched"


def test_unsupported_trait_is_rejected_by_name(device: str) -> None:
    kv = KVBlockManager(1, 1, 8, 4, 8, device, torch.float32, AppendPolicy(triton=False))
    staging = IndexStaging(kv.device, Counter())
    find_backend("sdpa")([LayerTraits(1.0)], kv, staging, Counter())
    with pytest.raises(UnsupportedModel, match="'sdpa': does not support window, which"):
        find_backend("sdpa")([LayerTraits(1.0), LayerTraits(1.0, window=8)], kv, staging, Counter())
