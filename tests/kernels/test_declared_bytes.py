"""Every kernel declares the bytes that it touches, neither more nor fewer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer.kernels import (
    append,
    attend_chunks,
    attend_decode,
    clone,
    gated,
    likeliest,
    linear,
    norm,
    rms_norm,
    rotary,
)
from roseinfer.rotation import Rotation
from tests.attention.layer_traits import traits_of
from tests.kernels.touched import touched_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="its kernels are those of the interpreter"
)
BLOCK = 16


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def caches(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(*shape, dtype=torch.float16), numbers(*shape, dtype=torch.float16)


def tables(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def appends(function: Callable[..., None], **where: torch.Tensor | int) -> None:
    """Two or three of four rows, to a cache of another dtype's size."""
    k_cache, v_cache = caches(6, 2, BLOCK, 8)
    rows = 4 if "batch_idx" in where else len(where["block_idx"])  # type: ignore[arg-type]
    new = {name: numbers(rows, 2, 8, dtype=torch.float16) for name in ("key_new", "value_new")}
    function(k_cache_layer=k_cache, v_cache_layer=v_cache, **new, **where)


def rotate(*gains: int, together: bool = False) -> None:
    """Three tokens, a part of whose heads of 20 does not turn."""
    qkv = numbers(3, 4 + 2 + 2, 20)
    angles = numbers(80, 12), numbers(80, 12)
    query_gain, key_gain = map(numbers, gains) if gains else (None, None)
    rotation = Rotation(*angles, query_gain, key_gain, 1e-6, together)
    rotary.rotate(qkv[:, :4], qkv[:, 4:6], index(7, 2, 0), rotation)


def attend(*, new: bool, more: Sequence[str] = ()) -> torch.Tensor:
    """Two sequences whose query heads share KV heads, in a pool that has room for more."""
    k_cache, v_cache = caches(12, 2, BLOCK, 20)
    qkv = numbers(2, 4 + 2 + 2, 20, dtype=torch.float16)
    query, key, value = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    lengths = index(70, 79)  # a new token fits into the blocks of both
    lists = tables([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    traits = traits_of(more, 4, 20, "cpu", window=39)
    if new:
        return attend_decode.append_and_attend(
            query, key, value, k_cache, v_cache, lists, lengths, traits
        )
    return attend_decode.paged_attention_decode(query, k_cache, v_cache, lists, lengths, traits)


def attend_to_chunks(more: Sequence[str] = ()) -> torch.Tensor:
    """Five new tokens behind eleven, and three behind none, in tiles of four."""
    k_cache, v_cache = caches(6, 2, BLOCK, 8)
    tiles = (index(0, 0, 1), index(0, 4, 5), index(4, 1, 3), index(11, 15, 0))
    return attend_chunks.paged_attention_chunks(
        numbers(8, 4, 8, dtype=torch.float16), k_cache, v_cache, tables([1, 2], [4, 0]), tiles,
        traits_of(more, 4, 8, "cpu", window=9), tile_q=4, longest=16,
    )  # fmt: skip


def choose() -> None:
    rows = 3
    likeliest.advance_to_likeliest(
        numbers(rows, 1500), index(0, 0, 0), index(0, 0, 0), index(4, 5, 6), index(1, 0, 1)
    )


def copy_blocks() -> None:
    k_cache, v_cache = caches(2, 6, 2, BLOCK, 8)
    clone.kv_clone_triton(k_cache=k_cache, v_cache=v_cache, source=index(1, 2), target=index(4, 5))


NORM = torch.nn.LayerNorm(24)
CALLS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "append": (
        lambda: appends(
            append.kv_append_triton, batch_idx=index(3, 1), block_idx=index(1, 2), pos=index(0, 5)
        ),
        ["_gather_kernel"],
    ),
    "append in order": (
        lambda: appends(
            append.kv_append_triton_identity_pos, block_idx=index(1, 2, 3), pos=index(0, 5, 2)
        ),
        ["_identity_pos_kernel"],
    ),
    "append at one position": (
        lambda: appends(append.kv_append_triton_full_batch, block_idx=index(1, 2), pos=3),
        ["_full_batch_kernel"],
    ),
    "clone": (copy_blocks, ["_clone_kernel"]),
    "attend": (lambda: attend(new=False), ["_decode_kernel"]),
    "append and attend": (lambda: attend(new=True), ["_decode_kernel"]),
    "attend in a window": (
        lambda: attend(new=False, more=["window", "cap", "slopes"]),
        ["_decode_kernel"],
    ),
    "append and attend in a window": (
        lambda: attend(new=True, more=["window", "sinks"]),
        ["_decode_kernel"],
    ),
    "chunks": (attend_to_chunks, ["_chunk_kernel"]),
    "chunks in a window": (
        lambda: attend_to_chunks(["window", "cap", "sinks", "slopes"]),
        ["_chunk_kernel"],
    ),
    "linear": (
        lambda: linear.linear(numbers(3, 70), numbers(70, 40), numbers(40), gelu=True),
        ["_whole_kernel"],
    ),
    "linear without a bias": (
        lambda: linear.linear(numbers(3, 70), numbers(40, 70).T),
        ["_whole_kernel"],
    ),
    "linear in parts": (
        lambda: linear.linear_in_parts(numbers(3, 300), numbers(300, 40)),
        ["_parts_kernel"],
    ),
    "norm": (
        lambda: norm.add_norm(numbers(3, 24), numbers(2, 3, 24), numbers(24), NORM),
        ["_add_norm_kernel"],
    ),
    "norm without a bias": (
        lambda: norm.add_norm(numbers(3, 24), numbers(1, 3, 24), None, NORM),
        ["_add_norm_kernel"],
    ),
    "embed": (
        lambda: norm.embed_norm(
            index(7, 2, 9), index(0, 1, 4), numbers(10, 24), numbers(6, 24), NORM
        ),
        ["_embed_norm_kernel"],
    ),
    "norm by the root mean square": (
        lambda: rms_norm.add_rms_norm(numbers(3, 24), numbers(2, 3, 24), numbers(24), 1e-6),
        ["_add_kernel"],
    ),
    "norm by the root mean square behind": (
        lambda: rms_norm.add_behind_rms_norm(numbers(3, 24), numbers(2, 3, 24), numbers(24), 1e-6),
        ["_behind_kernel"],
    ),
    "embed by the root mean square": (
        lambda: rms_norm.embed_rms_norm(index(7, 2, 9), numbers(10, 24), numbers(24), 1e-6),
        ["_embed_kernel"],
    ),
    "gated": (lambda: gated.linear_gated(numbers(3, 70), numbers(80, 70)), ["_gated_kernel"]),
    "gated at once": (lambda: gated.multiply_gated(numbers(3, 80)), ["_multiply_kernel"]),
    "rotate": (rotate, ["_rotate_kernel"]),
    "norm and rotate": (lambda: rotate(20, 20), ["_rotate_kernel"]),
    "norm together and rotate": (
        lambda: rotate(80, 40, together=True),
        ["_rotate_kernel"],
    ),
    "choose": (choose, ["_strip_kernel", "_advance_kernel"]),
}


@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_a_kernel_declares_what_it_touches(name: str) -> None:
    call, kernels = CALLS[name]
    found = touched_by(call)
    assert found.kernels == kernels
    assert found.differing == []


def test_every_kernel_is_among_them() -> None:
    modules = (
        append,
        attend_chunks,
        attend_decode,
        clone,
        gated,
        likeliest,
        linear,
        norm,
        rms_norm,
        rotary,
    )
    there = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    files = {path.stem for path in Path(append.__file__).parent.glob("*.py")}
    without = {"__init__", "dot", "moves", "operands", "runtime", "scores"}
    assert {module.__name__.rpartition(".")[2] for module in modules} == files - without
    called = {kernel for _, kernels in CALLS.values() for kernel in kernels}
    assert there == called | {"_combine_kernel"}


@pytest.mark.parametrize("new", [True, False])
@torch.inference_mode()
def test_a_context_in_parts_is_declared_with_what_each_part_found(
    monkeypatch: pytest.MonkeyPatch, new: bool
) -> None:
    monkeypatch.setattr(attend_decode, "_num_parts", lambda *_: 2)
    found = touched_by(lambda: attend(new=new))
    assert found.kernels == ["_decode_kernel", "_combine_kernel"]
    assert found.differing == []


def test_a_declaration_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    function = linear._whole_kernel.fn
    right = function.moves
    monkeypatch.setattr(function, "moves", lambda given: right(given) | {"weight": 70 * 40 * 2})
    found = touched_by(CALLS["linear"][0])
    assert found.differing == ["_whole_kernel touches 11200 bytes of weight, and declares 5600"]
