"""For which models there is a kernel of a whole step, how it is compiled, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda.whole_step import (
    KERNEL,
    StepSizes,
    choose_ring,
    device_unsupported_reason,
    sizes_of,
    source,
    unsupported_reason,
)
from roseinfer.kernels.kernel import compile_in_parallel
from roseinfer.layer_traits import LayerTraits, RotaryEmbedding
from roseinfer.models.families.whole_step import MegakernelRunner
from tests.kernels.cuda.whole_step.small_models import small_rig, small_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LLAMA_1B = StepSizes(
    width=2048, heads=32, kv_heads=8, dim=128, mlp=8192, vocab=128256, rotary_dim=128,
    block_size=64, out_parts=4, down_parts=4, norm_warps=16, programs=132,
)  # fmt: skip
H200 = 227 << 10
"""Bytes of shared memory of a program."""
PLAIN = [LayerTraits(0.125)] * 2


def test_a_ring_of_an_h200() -> None:
    assert choose_ring(LLAMA_1B, H200) == replace(LLAMA_1B, stages=25, in_flight=4, max_chunk=512)
    wide = choose_ring(replace(LLAMA_1B, width=4096, mlp=14336), H200)
    assert wide is not None
    assert wide.unstaged_bytes() + wide.stages * wide.stage_bytes() <= H200
    assert wide.in_flight * wide.tile_bytes() == 32 << 10
    assert wide.stages >= 8 + wide.in_flight
    assert choose_ring(LLAMA_1B, 64 << 10) is None


def test_nothing_is_decided_while_kernels_only_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial would compare unwritten outputs; this attention has no cache for one."""
    monkeypatch.setattr("roseinfer.kernels.kernel.is_interpreted", lambda: False)
    model: Any = SimpleNamespace(max_megakernel_tokens=9, ranks=None)
    row = SimpleNamespace(tables=[torch.zeros(1, 3)], lengths=torch.zeros(1))
    attention: Any = SimpleNamespace(single_row_batch=lambda: row)
    runner = MegakernelRunner(model, pytest.fail)
    logits: list[Any] = []
    compile_in_parallel(
        lambda: logits.append(runner.logits(torch.zeros(1), attention)), torch.device("cuda")
    )
    assert logits == [None]


def test_sizes_are_those_of_weights() -> None:
    rig = small_rig(small_sizes(16), 20)
    found = sizes_of(rig.weights, 32, rig.caches[0][0], 3)
    assert found == replace(rig.sizes, stages=0, in_flight=4, max_chunk=1024)
    assert unsupported_reason(found, rig.weights, rig.caches[0][0], PLAIN) == ""


def test_what_the_kernel_does_not_compute() -> None:
    rig = small_rig(small_sizes(16), 20)
    keys = rig.caches[0][0]

    def refused(traits: Any = PLAIN, cache: Any = keys, layer: Any = None, **sizes: Any) -> str:
        weights = rig.weights
        if layer is not None:
            weights = replace(weights, layers=[replace(weights.layers[0], **layer)] * 2)
        return unsupported_reason(replace(rig.sizes, **sizes), weights, cache, traits)

    first = rig.weights.layers[0]
    rotation = first.rotation
    assert rotation is not None
    gains = RotaryEmbedding(
        rotation.cosines, rotation.sines, first.norm, first.norm, norm_across_heads=True
    )
    assert "window" in refused([LayerTraits(0.125, window=9)] * 2)
    assert "scale" in refused([LayerTraits(0.125), LayerTraits(0.5)])
    assert "heads of 40" in refused(dim=40)
    assert "heads of 256" in refused(dim=256)
    assert "blocks of 40 tokens" in refused(block_size=40)
    assert "fewer rows" in refused(programs=257)
    assert "tiles" in refused(mlp=1000)
    assert "tiles" in refused(mlp=2 * 160)
    assert "query heads" in refused(heads=64)
    assert "norms across heads" in refused(layer={"rotation": gains})
    large = {"heads": 16, "kv_heads": 8, "dim": 128, "rotary_dim": 128}
    assert refused(**large, normed=True) == refused(**large) == ""
    assert "norms of 8 KV heads of 112" in refused(
        **large | {"dim": 112, "rotary_dim": 112}, normed=True
    )
    assert "norms of 4 KV heads of 128" in refused(**large | {"kv_heads": 4}, normed=True)
    assert "bfloat16" in refused(layer={"down": first.down.float()})
    assert "weights" in refused(layer={"down": first.down.T.contiguous().T})
    assert "cache of" in refused(cache=keys.float())
    assert "blocks" in refused(cache=keys.transpose(1, 2))
    assert device_unsupported_reason(torch.device("cpu"))


def test_what_was_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def compile_cubin(text: str, options: Any) -> bytes:
        asked.append(text)
        return f"{text} {options[0]}".encode()

    def made(text: str, defines: Mapping[str, int]) -> bytes:
        return toolchain.compile_cached(text, defines, torch.device("cuda"))

    monkeypatch.setattr(toolchain, "compile_cubin", compile_cubin)
    monkeypatch.setattr(toolchain, "version", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(toolchain, "_cache_folder", lambda: tmp_path / "cache")
    for _ in range(2):
        assert made("step", {"WIDTH": 8}) == b"step -DWIDTH=8"
        assert made("step", {"WIDTH": 9}) == b"step -DWIDTH=9"
    assert asked == ["step", "step"]
    (tmp_path / "file").touch()
    monkeypatch.setattr(toolchain, "_cache_folder", lambda: tmp_path / "file")
    assert made("other", {"WIDTH": 9}) == b"other -DWIDTH=9"


def test_it_compiles() -> None:
    """Wherever NVRTC is, a GPU or not."""
    try:
        toolchain.version()
    except toolchain.CompilationError:
        pytest.skip("NVRTC is not here")
    cut = choose_ring(LLAMA_1B, H200)
    assert cut is not None
    options = [f"-D{name}={value}" for name, value in cut.defines().items()]
    options += ["--gpu-architecture=sm_90a", "--std=c++17", "--fmad=false"]
    assert toolchain.compile_cubin(source() + KERNEL.layout_assertions(), options)
    with pytest.raises(toolchain.CompilationError, match="expected"):
        toolchain.compile_cubin("__device__ int x = ;", [])
