"""A call of every kernel, small, whose rows, heads and widths fill no tile.

Tensors are made on the default device, which ``with torch.device(...)`` sets.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING
from unittest import mock

import torch

from roseinfer.kernels import triton
from roseinfer.kernels.kernel import TritonKernel
from roseinfer.kernels.triton import (
    append,
    clone,
    decode_attention,
    experts,
    greedy,
    linear,
    norm,
    prefill_attention,
    rope,
    streamed,
)
from roseinfer.kernels.triton.all_reduce import AllReduceBuffers
from roseinfer.kernels.triton.experts import route_rows
from roseinfer.layer_traits import RotaryEmbedding
from tests.attention.layer_traits import traits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Two or three of four rows, the last block among theirs."""
    k_cache, v_cache = caches(6, 3, BLOCK, 12)
    rows = 4 if "batch_idx" in where else len(where["block_idx"])  # type: ignore[arg-type]
    new = {name: numbers(rows, 3, 12, dtype=torch.float16) for name in ("key_new", "value_new")}
    function(k_cache_layer=k_cache, v_cache_layer=v_cache, **new, **where)


def rotate(*gains: int, norm_across_heads: bool = False, of: str = "both") -> None:
    """Three tokens, a part of whose heads of 20 does not turn."""
    qkv = numbers(3, 4 + 2 + 2, 20)
    angles = numbers(80, 12), numbers(80, 12)
    query_norm_weight, key_norm_weight = map(numbers, gains) if gains else (None, None)
    rotation = RotaryEmbedding(*angles, query_norm_weight, key_norm_weight, 1e-6, norm_across_heads)
    query, key = (qkv[:, :4], qkv[:, 4:6]) if of == "both" else (None, qkv[:, 4:6])
    rope.rotate(query, key, index(7, 2, 0), rotation)


def attend(*, new: bool, more: Sequence[str] = (), turn: int = 0) -> torch.Tensor:
    """Two sequences whose query heads share KV heads, in a pool that has room for more."""
    k_cache, v_cache = caches(12, 2, BLOCK, 20)
    qkv = numbers(2, 4 + 2 + 2, 20, dtype=torch.float16)
    query, key, value = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    lengths = index(70, 79)  # a new token fits into the blocks of both
    lists = tables([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    traits = traits_of(more, 4, 20, str(torch.get_default_device()), window=39)
    if new:
        rotation = RotaryEmbedding(*numbers(2, 80, turn, dtype=torch.float16)) if turn else None
        return decode_attention.append_and_attend(
            query, key, value, k_cache, v_cache, lists, lengths, traits, rotation
        )
    return decode_attention.paged_attention_decode(query, k_cache, v_cache, lists, lengths, traits)


def attend_in_parts(*, new: bool) -> torch.Tensor:
    """The same with every context in two parts, as only GPUs have them."""
    with mock.patch.object(decode_attention, "_num_splits", return_value=2):
        return attend(new=new)


def combine() -> None:
    """Two parts of one context and one of another, and what was seen of their own tokens."""
    largest, weights = numbers(2, 2 * 4 * 3).exp()
    decode_attention.merge_parts(
        numbers(2 * 4 * 3, 20), largest, weights, index(130, 5),
        numbers(2, 4, 20, dtype=torch.float16), 3, 0, 32, 1, appends=False,
    )  # fmt: skip


def attend_to_chunks(more: Sequence[str] = ()) -> torch.Tensor:
    """Five new tokens behind eleven, and three behind none, in tiles of four."""
    k_cache, v_cache = caches(6, 2, BLOCK, 8)
    tiles = (index(0, 0, 1), index(0, 4, 5), index(4, 1, 3), index(11, 15, 0))
    return prefill_attention.paged_attention_chunks(
        numbers(8, 4, 8, dtype=torch.float16), k_cache, v_cache, tables([1, 2], [4, 0]), tiles,
        traits_of(more, 4, 8, str(torch.get_default_device()), window=9), tile_q=4, longest=16,
    )  # fmt: skip


def choose() -> None:
    rows = 3
    greedy.argmax_and_advance(
        numbers(rows, 3000), index(0, 0, 0), index(0, 0, 0), index(4, 5, 6), index(1, 0, 1)
    )


def copy_blocks() -> None:
    k_cache, v_cache = caches(2, 6, 3, BLOCK, 8)
    clone.kv_clone_triton(k_cache=k_cache, v_cache=v_cache, source=index(1, 2), target=index(4, 5))


def copy_between_pools() -> None:
    """The last block of the one goes to the last of the other."""
    small, large = caches(2, 4, 3, BLOCK, 8), caches(2, 6, 3, BLOCK, 8)
    clone.launch_clone(*small, *large, index(1, 3), index(4, 5))


def exchanged(rows: int, width: int) -> AllReduceBuffers:
    """Return what the last of two ranks has, to which the other has sent its numbers already."""
    most, peers = rows + 2, torch.zeros(2 * 2 * (rows + 2) * width, dtype=torch.int64)
    _WRITTEN_TO[:] = [peers]
    inbox = torch.zeros(2, 2, most, width, dtype=torch.int64)
    inbox[1, 0] = 1 << 32  # 0.0, in the first round
    return AllReduceBuffers(
        1, 2, 1, most, inbox, torch.tensor([peers.data_ptr(), inbox.data_ptr()]),
        torch.zeros(most, dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip


_WRITTEN_TO: list[torch.Tensor] = []
"""What stands for the memory of another GPU, kept as long as a kernel may write to it."""


def visit(rows: int, num_experts: int) -> None:
    """Two experts for each row."""
    chosen = torch.rand(rows, num_experts).argsort(-1)[:, :2].to(torch.int32)
    visits = route_rows(chosen, num_experts)
    inner = experts.expert_gate_up(numbers(rows, 70), numbers(num_experts, 2 * 40, 70), visits)
    experts.expert_down(inner, numbers(num_experts, 30, 40), numbers(rows, 2), visits)


def layer_norm() -> torch.nn.LayerNorm:
    return torch.nn.LayerNorm(24)


_VISITS = ["_gate_up_kernel", "_down_kernel"]
CALLS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "append": (
        lambda: appends(
            append.kv_append_triton, batch_idx=index(3, 1), block_idx=index(1, 5), pos=index(0, 5)
        ),
        ["_gather_kernel"],
    ),
    "append in order": (
        lambda: appends(
            append.kv_append_triton_identity_pos, block_idx=index(1, 2, 5), pos=index(0, 5, 2)
        ),
        ["_identity_pos_kernel"],
    ),
    "append at one position": (
        lambda: appends(append.kv_append_triton_full_batch, block_idx=index(1, 2, 5), pos=3),
        ["_full_batch_kernel"],
    ),
    "clone": (copy_blocks, ["_clone_kernel"]),
    "clone between pools": (copy_between_pools, ["_clone_kernel"]),
    "attend": (lambda: attend(new=False), ["_decode_kernel"]),
    "append and attend": (lambda: attend(new=True), ["_decode_kernel"]),
    "append, rotate and attend": (lambda: attend(new=True, turn=12), ["_decode_kernel"]),
    "attend in a window": (
        lambda: attend(new=False, more=["window", "softcap", "slopes"]),
        ["_decode_kernel"],
    ),
    "append and attend in a window": (
        lambda: attend(new=True, more=["window", "sinks"]),
        ["_decode_kernel"],
    ),
    "attend in parts": (lambda: attend_in_parts(new=False), ["_decode_kernel", "_combine_kernel"]),
    "append and attend in parts": (
        lambda: attend_in_parts(new=True),
        ["_decode_kernel", "_combine_kernel"],
    ),
    "combine": (combine, ["_combine_kernel"]),
    "chunks": (attend_to_chunks, ["_chunk_kernel"]),
    "chunks in a window": (
        lambda: attend_to_chunks(["window", "softcap", "sinks", "slopes"]),
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
    "activation": (lambda: linear.gelu(numbers(3, 70)), ["_gelu_kernel"]),
    "linear in parts": (
        lambda: linear.split_k_linear(numbers(3, 300), numbers(300, 40), 3),
        ["_parts_kernel"],
    ),
    "norm": (
        lambda: norm.add_norm(numbers(3, 24), numbers(2, 3, 24), numbers(24), layer_norm()),
        ["_add_norm_kernel"],
    ),
    "norm without a bias": (
        lambda: norm.add_norm(numbers(3, 24), numbers(1, 3, 24), None, layer_norm()),
        ["_add_norm_kernel"],
    ),
    "norm of a sum over ranks": (
        lambda: norm.add_norm(
            numbers(3, 24), numbers(2, 3, 24), numbers(24), layer_norm(), exchanged(3, 24)
        ),
        ["_add_norm_kernel"],
    ),
    "norm of a sum over ranks by the root mean square": (
        lambda: norm.add_rms_norm(
            numbers(3, 24), numbers(2, 3, 24), numbers(24), 1e-6, exchange=exchanged(3, 24)
        ),
        ["_add_kernel"],
    ),
    "embed": (
        lambda: norm.embed_norm(
            index(7, 2, 9), index(0, 1, 4), numbers(10, 24), numbers(6, 24), layer_norm()
        ),
        ["_embed_norm_kernel"],
    ),
    "norm by the root mean square": (
        lambda: norm.add_rms_norm(numbers(3, 24), numbers(2, 3, 24), numbers(24), 1e-6),
        ["_add_kernel"],
    ),
    "norm by the root mean square alone": (
        lambda: norm.rms_norm(numbers(3, 24), numbers(24), 1e-6),
        ["_norm_kernel"],
    ),
    "norm by the root mean square behind": (
        lambda: norm.rms_norm_then_add(numbers(3, 24), numbers(2, 3, 24), numbers(24), 1e-6),
        ["_norm_then_add_kernel"],
    ),
    "embed by the root mean square": (
        lambda: norm.embed_rms_norm(index(7, 2, 9), numbers(10, 24), numbers(24), 1e-6),
        ["_embed_kernel"],
    ),
    "streamed": (
        lambda: streamed.stream_linear(numbers(3, 70), numbers(40, 70), numbers(40)),
        ["_streamed_kernel"],
    ),
    "streamed in parts": (
        lambda: streamed.stream_linear_split_k(numbers(3, 1090), numbers(40, 1090)),
        ["_streamed_kernel"],
    ),
    "gated": (lambda: streamed.stream_gate_up(numbers(3, 70), numbers(80, 70)), ["_gated_kernel"]),
    "gated at once": (lambda: streamed.silu_and_mul(numbers(3, 80)), ["_multiply_kernel"]),
    "choose experts": (
        lambda: experts.select_experts(
            numbers(2, 3, 20), numbers(1), 3, torch.float32, renormalize=True
        ),
        ["_choose_kernel"],
    ),
    "visit few experts": (lambda: visit(3, 3), _VISITS),
    "visit few of many experts": (lambda: visit(3, 20), _VISITS),
    "visit experts by many rows": (lambda: visit(70, 3), _VISITS),
    "rotate": (rotate, ["_rotate_kernel"]),
    "rotate keys": (lambda: rotate(of="keys"), ["_rotate_kernel"]),
    "norm and rotate": (lambda: rotate(20, 20), ["_rotate_kernel"]),
    "norm together and rotate": (
        lambda: rotate(80, 40, norm_across_heads=True),
        ["_rotate_kernel"],
    ),
    "choose": (choose, ["_strip_kernel", "_advance_kernel"]),
}


def all_kernels() -> list[TritonKernel]:
    """Return every kernel in Triton."""
    found = iter_modules(triton.__path__, f"{triton.__name__}.")
    modules = [import_module(each.name) for each in found]
    values = {id(value): value for module in modules for value in vars(module).values()}
    return [value for value in values.values() if isinstance(value, TritonKernel)]
