"""Kernels compile for GPUs, which needs none: under Triton's interpreter anything goes."""

from __future__ import annotations

import importlib.util

import pytest

from tests.python_process import run_python

COMPILE = """
    import sys
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from roseinfer.kernels.triton.prefill_attention import _chunk_kernel
    from roseinfer.kernels.triton.decode_attention import _decode_kernel, _warps
    from roseinfer.kernels.triton.decode_attention import _combine_kernel
    from roseinfer.kernels.triton.softmax import tile_of_tokens
    from roseinfer.kernels.triton.greedy import _advance_kernel, _strip_kernel
    from roseinfer.kernels.triton.linear import _gelu_kernel, _parts_kernel, _whole_kernel
    from roseinfer.kernels.triton.norm import _add_norm_kernel, _embed_norm_kernel
    from roseinfer.kernels.triton.norm import _add_kernel, _norm_then_add_kernel
    from roseinfer.kernels.triton.norm import _embed_kernel, _norm_kernel
    from roseinfer.kernels.triton.experts import _choose_kernel
    from roseinfer.kernels.triton.experts import _gate_up_kernel, _down_kernel
    from roseinfer.kernels.triton.streamed import _gated_kernel, _multiply_kernel
    from roseinfer.kernels.triton.streamed import _streamed_kernel
    from roseinfer.kernels.triton.rope import _rotate_kernel

    INDEX = set("tables lengths sequences rows counts positions chosen tokens active".split())
    SINGLE = set("partial weights_max weights_sum added best".split())
    OWN = set("query key value k_cache v_cache x weight bias out logits residual gain shift "
              "normed words places both cosines sines query_norm_weight "
              "key_norm_weight weights like".split())
    EXPERTS = (_choose_kernel, _gate_up_kernel, _down_kernel)

    def kind(kernel, name, dtype):
        if name in ("place", "kind"):
            return "*i32"
        if name in ("inbox", "inboxes"):
            return "*i64"
        if name in ("rounds", "gone"):
            return "*i32"
        if kernel in EXPERTS and name in ("experts", "parts", "order", "tiles"):
            return dict(experts="*i32", parts="*fp32").get(name, "*i64")
        if kernel is _down_kernel and name == "out":
            return "*fp32"
        if kernel in (
            _whole_kernel, _parts_kernel, _gated_kernel, _streamed_kernel, _norm_kernel, *EXPERTS
        ):
            if name == "rows":
                return "i32"
            if name == "out" and kernel is _parts_kernel:
                return "*fp32"
        if name in INDEX:
            return "*i64"
        if name in SINGLE:
            return "*fp32"
        if name in OWN:
            return "*" + dtype
        if name in ("sinks", "slopes"):
            return "*fp32"
        return "fp32" if name in ("scale", "cap", "epsilon", "times") else "i32"

    def check(kernel, dtype, warps=4, **constants):
        names = kernel.jit.arg_names
        if "EARLY" in names:
            constants["EARLY"] = capability >= 90
        if "WINDOW" in names:
            constants = {name: no for name, no in PLAIN.items() if name in names} | constants
        types = {n: "constexpr" if n in constants else kind(kernel, n, dtype) for n in names}
        if 1 in (constants.get("PARTS"), constants.get("SPLITS")):  # nothing to combine
            types |= {name: "*" + dtype for name in SINGLE if name in names}
        given = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel.jit, signature=types, constexprs=given)
        target = GPUTarget("cuda", capability, 32)
        made = compile(source, target=target, options=dict(num_warps=warps, enable_fp_fusion=False))
        assert made.asm["cubin"]
        assert made.metadata.shared <= 64 << 10
        print(kernel.name)

    PLAIN = dict(WINDOW=0, CAPPED=False, SINKING=False, SLOPED=False)
    traits = dict(WINDOW=40, CAPPED=True, SINKING=True, SLOPED=True)
    capability, dtype = int(sys.argv[1]), sys.argv[2]
    attends = dict(GROUP=2, D=80, TILE_D=128, TILE_T=64, LIMIT=0)
    decodes = dict(Q_HEADS=4, TILE_G=16, ROWS=9, TURN=0, **attends)
    for block in (16, 64):
        check(_decode_kernel, dtype, BLOCK=block, SPLITS=4, APPENDS=True, ROOM=True, **decodes)
    check(_decode_kernel, dtype, BLOCK=64, SPLITS=1, APPENDS=True, ROOM=True, **decodes)
    check(_decode_kernel, dtype, BLOCK=16, SPLITS=4, APPENDS=False, ROOM=False, **decodes)
    for head_dim, kind_of, size in ((64, "fp32", 4), (128, dtype, 2), (256, "fp32", 4)):
        for programs in (1, 1 << 20):
            decodes |= dict(D=head_dim, TILE_D=head_dim, TILE_T=tile_of_tokens(head_dim * size))
            ways = dict(BLOCK=64, SPLITS=1, APPENDS=True, ROOM=programs == 1)
            check(_decode_kernel, kind_of, _warps(programs, head_dim), **ways, **decodes)
    ways = dict(BLOCK=64, SPLITS=1, APPENDS=True, ROOM=True)
    check(_decode_kernel, dtype, **ways, **decodes, **traits)
    check(_decode_kernel, dtype, **ways, **{**decodes, "TURN": 64})
    heads = dict(Q_HEADS=4, K_HEADS=2, D=80, TILE_Q=4, TILE_K=2, TILE_D=128)
    for together in (False, True):
        check(_rotate_kernel, dtype, TURN=64, NORMED=True, ACROSS_HEADS=together, **heads)
    chunk = dict(BLOCK=16, TILE_Q=16, TILE_G=2, STAGES=2, **attends)
    check(_chunk_kernel, dtype, **chunk)
    check(_chunk_kernel, dtype, **chunk, **traits)
    check(_combine_kernel, dtype, Q_HEADS=4, D=80, TILE_D=128, ROWS=9, APPENDS=True, LIMIT=0)
    tile = dict(TILE_R=16, TILE_N=32, TILE_K=64)
    check(_whole_kernel, dtype, N=48, K=100, STAGES=3, BIAS=True, GELU=True, **tile)
    check(_gelu_kernel, dtype, N=48, TILE=64)
    check(_parts_kernel, dtype, N=48, K=500, PARTS=2, **tile)
    tile = dict(TILE_R=16, TILE_N=64, TILE_K=64, STAGES=3, PREFETCHES=True)
    check(_streamed_kernel, dtype, N=48, K=500, PARTS=2, BIAS=True, **tile)
    check(_gated_kernel, dtype, N=48, K=100, **tile)
    check(_choose_kernel, dtype, 1, N=60, TILE_N=64, PARTS=2, MOST=6, TILE_M=8, RENORMALIZE=True)
    tile = dict(N=48, K=100, TILE_R=16, TILE_N=64, TILE_K=64, STAGES=3, MOST=6)
    for few, looked_through in ((True, 64), (True, 0), (False, 0)):
        for kernel in EXPERTS[1:]:
            check(kernel, dtype, **tile, FEW=few, TILE_A=looked_through)
    for ranks, together, kind_of in ((1, 1, dtype), (2, 2, dtype), (2, 1, dtype), (2, 1, "fp32")):
        over = dict(ROWS=8, RANK=ranks - 1, RANKS=ranks, VALUES_PER_WORD=together)
        check(_add_norm_kernel, kind_of, N=48, TILE_N=64, PARTS=2, BIAS=True, **over)
        check(_add_kernel, kind_of, N=48, TILE_N=64, PARTS=2, **over)
    check(_embed_norm_kernel, dtype, N=48, TILE_N=64)
    check(_norm_then_add_kernel, dtype, N=48, TILE_N=64, PARTS=2)
    check(_norm_kernel, dtype, N=48, TILE_N=64, ROWS=4)
    check(_embed_kernel, dtype, N=48, TILE_N=64)
    check(_multiply_kernel, dtype, N=48, TILE=64)
    check(_strip_kernel, dtype, N=5000, STRIP=1024, TILE=1024)
    check(_advance_kernel, dtype, N=5000, TILE=8)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(90, "bf16"), (80, "fp16")])
def test_the_kernels_of_decoding_compile(capability: int, dtype: str) -> None:
    """For GPUs that let kernels start early, and for others."""
    code = COMPILE.replace("sys.argv[1]", f"'{capability}'").replace("sys.argv[2]", f"'{dtype}'")
    assert len(run_python(code, warm=True).split()) == 44
