"""Planted accesses out of bounds for each family of kernels: a read and a write.

The reads do not change results: their values are masked later, or never stored.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, NamedTuple

from tests.kernels import calls
from tests.mutants.install import source_of
from tests.mutants.mutant import Mutant

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


class Planted(NamedTuple):
    """Statements of a kernel, their replacement, and the call that makes the planted access."""

    verb: str
    parameter: str
    call: str
    function: str
    find: str
    replace: str


FAMILIES: dict[str, tuple[Planted, ...]] = {
    "append": (
        Planted(
            "reads",
            "key",
            "append in order",
            "_copy_tokens",
            "k = tl.load(key + (rows * k_r + heads * k_h + dims * k_d), inside)",
            """
            k = tl.load(
                key + (rows * k_r + heads * k_h + dims * k_d), (heads < H) & (dims < D)
            )
            """,
        ),
        Planted(
            "writes",
            "v_cache",
            "append",
            "_copy_tokens",
            """
            tl.store(
                v_cache + (blocks * vc_b + positions * vc_t + heads * vc_h + dims * vc_d),
                v,
                inside,
            )
            """,
            """
            tl.store(
                v_cache + (blocks * vc_b + positions * vc_t + heads * vc_h + dims * vc_d),
                v,
                (dims < D) & exist[:, None, None],
            )
            """,
        ),
    ),
    "clone": (
        Planted(
            "reads",
            "k_from",
            "clone between pools",
            "_clone_kernel",
            """
            k = tl.load(k_from + layer * kf_l + old * kf_b + h * kf_h + t * kf_t + d * kf_d, inside)
            """,
            "k = tl.load(k_from + layer * kf_l + old * kf_b + h * kf_h + t * kf_t + d * kf_d)",
        ),
        Planted(
            "writes",
            "v_to",
            "clone",
            "_clone_kernel",
            """
            tl.store(v_to + layer * vt_l + new * vt_b + h * vt_h + t * vt_t + d * vt_d, v, inside)
            """,
            "tl.store(v_to + layer * vt_l + new * vt_b + h * vt_h + t * vt_t + d * vt_d, v)",
        ),
    ),
    "decode_attention": (
        Planted(
            "reads",
            "tables",
            "attend",
            "_decode_kernel",
            "blocks = tl.load(table + tokens // BLOCK, stored, other=0).to(tl.int64)",
            "blocks = tl.load(table + tokens // BLOCK).to(tl.int64)",
        ),
        Planted(
            "writes",
            "out",
            "attend",
            "_decode_kernel",
            """
            tl.store(
                out + sequence * o_s + heads[:, None] * o_h + dims[None, :],
                (all_sums / all_total[:, None]).to(out.dtype.element_ty), q_inside,
            )
            """,
            """
            tl.store(
                out + sequence * o_s + heads[:, None] * o_h + dims[None, :],
                (all_sums / all_total[:, None]).to(out.dtype.element_ty), d_inside[None, :],
            )
            """,
        ),
        Planted(
            "reads",
            "weights_sum",
            "combine",
            "_combine_kernel",
            "total = tl.load(weights_sum + row + at + one, there, other=0.0)",
            "total = tl.load(weights_sum + row + at + one)",
        ),
        Planted(
            "writes",
            "out",
            "combine",
            "_combine_kernel",
            """
            tl.store(
                out + sequence * o_s + head * o_h + dims * o_d,
                result.to(out.dtype.element_ty), inside,
            )
            """,
            """
            tl.store(
                out + sequence * o_s + head * o_h + dims * o_d,
                result.to(out.dtype.element_ty), dims >= 0,
            )
            """,
        ),
    ),
    "prefill_attention": (
        Planted(
            "reads",
            "tables",
            "chunks",
            "_load_tokens",
            "blocks = tl.load(table + tokens // BLOCK, inside, other=0).to(tl.int64)",
            "blocks = tl.load(table + tokens // BLOCK).to(tl.int64)",
        ),
        Planted(
            "writes",
            "out",
            "chunks",
            "_chunk_kernel",
            """
            tl.store(
                out + (row + token)[:, None] * o_s + head[:, None] * o_h + dims[None, :] * o_d,
                (all_sums / all_total[:, None]).to(out.dtype.element_ty), there[:, None] & d_inside,
            )
            """,
            """
            tl.store(
                out + (row + token)[:, None] * o_s + head[:, None] * o_h + dims[None, :] * o_d,
                (all_sums / all_total[:, None]).to(out.dtype.element_ty), real[:, None] & d_inside,
            )
            """,
        ),
    ),
    "linear": (
        Planted(
            "reads",
            "bias",
            "linear",
            "_whole_kernel",
            "b = tl.load(bias + n, n < N, other=0.0).to(tl.float32)",
            "b = tl.load(bias + n).to(tl.float32)",
        ),
        Planted(
            "writes",
            "out",
            "linear in parts",
            "_parts_kernel",
            """
            tl.store(
                out + part * o_p + r[:, None] * o_r + n[None, :], total, x_in & (n < N)[None, :]
            )
            """,
            """
            tl.store(
                out + part * o_p + r[:, None] * o_r + n[None, :], total, (n < N)[None, :]
            )
            """,
        ),
    ),
    "streamed": (
        Planted(
            "reads",
            "x",
            "streamed",
            "_streamed_kernel",
            "a = tl.load(x_rows + k[:, None], x_tile, other=0.0)",
            "a = tl.load(x_rows + k[:, None], (k < K)[:, None], other=0.0)",
        ),
        Planted(
            "writes",
            "out",
            "streamed in parts",
            "_streamed_kernel",
            """
            tl.store(
                out + part * o_p + r[None, :] * o_r + n[:, None],
                total.to(out.dtype.element_ty), w_in & x_in,
            )
            """,
            """
            tl.store(
                out + part * o_p + r[None, :] * o_r + n[:, None],
                total.to(out.dtype.element_ty), w_in,
            )
            """,
        ),
        Planted(
            "reads",
            "x",
            "gated",
            "_gated_kernel",
            "a = tl.load(x_rows + k[:, None], x_tile, other=0.0)",
            "a = tl.load(x_rows + k[:, None], (k < K)[:, None], other=0.0)",
        ),
        Planted(
            "writes",
            "out",
            "gated at once",
            "_multiply_kernel",
            "tl.store(out + row * o_r + n, gated(gate, up, out.dtype.element_ty), n < N)",
            "tl.store(out + row * o_r + n, gated(gate, up, out.dtype.element_ty))",
        ),
    ),
    "experts": (
        Planted(
            "reads",
            "parts",
            "choose experts",
            "_choose_kernel",
            "total += tl.load(parts + part * p_p + row * p_r + n, inside, other=0.0)",
            "total += tl.load(parts + part * p_p + row * p_r + n)",
        ),
        Planted(
            "writes",
            "weights",
            "choose experts",
            "_choose_kernel",
            "tl.store(weights + row * MOST + m, counts.to(weights.dtype.element_ty), m < MOST)",
            "tl.store(weights + row * MOST + m, counts.to(weights.dtype.element_ty))",
        ),
        Planted(
            "reads",
            "weight",
            "visit experts by many rows",
            "_down_kernel",
            "w = tl.load(w_rows + k[None, :], w_tile, other=0.0)",
            "w = tl.load(w_rows + k[None, :], (k < K)[None, :], other=0.0)",
        ),
        Planted(
            "writes",
            "out",
            "visit experts by many rows",
            "_gate_up_kernel",
            "tl.store(places, gated(gate, up, out.dtype.element_ty), w_in & x_in)",
            "tl.store(places, gated(gate, up, out.dtype.element_ty), x_in & (n >= 0)[:, None])",
        ),
    ),
    "norm": (
        Planted(
            "reads",
            "gain",
            "norm",
            "_add_norm_kernel",
            "g = tl.load(gain + n, inside, other=0.0).to(tl.float32)",
            "g = tl.load(gain + n).to(tl.float32)",
        ),
        Planted(
            "writes",
            "normed",
            "embed",
            "_embed_norm_kernel",
            "tl.store(normed + row * n_r + n, scaled.to(normed.dtype.element_ty), inside)",
            "tl.store(normed + row * n_r + n, scaled.to(normed.dtype.element_ty))",
        ),
        Planted(
            "reads",
            "residual",
            "norm by the root mean square behind",
            "_norm_then_add_kernel",
            "x = tl.load(residual + row * r_r + n, inside, other=0.0).to(tl.float32)",
            "x = tl.load(residual + row * r_r + n).to(tl.float32)",
        ),
        Planted(
            "writes",
            "residual",
            "embed by the root mean square",
            "_embed_kernel",
            "tl.store(residual + row * r_r + n, x, inside)",
            "tl.store(residual + row * r_r + n, x)",
        ),
    ),
    "rope": (
        Planted(
            "reads",
            "key",
            "rotate",
            "load_rotated",
            "x = tl.load(heads[:, None] + dims[None, :], inside, other=0.0).to(tl.float32)",
            """
            x = tl.load(
                heads[:, None] + dims[None, :], (at < HEADS)[:, None], other=0.0
            ).to(tl.float32)
            """,
        ),
        Planted(
            "writes",
            "query",
            "rotate",
            "_rotate_kernel",
            """
            tl.store(
                queries[:, None] + dims[None, :], turned_q.to(query.dtype.element_ty),
                (q < Q_HEADS)[:, None] & whole,
            )
            """,
            """
            tl.store(
                queries[:, None] + dims[None, :], turned_q.to(query.dtype.element_ty),
                (q < Q_HEADS)[:, None],
            )
            """,
        ),
    ),
    "greedy": (
        Planted(
            "reads",
            "place",
            "choose",
            "_advance_kernel",
            "first = tl.load(place + row * strips + strip, inside, other=N)",
            "first = tl.load(place + row * strips + strip)",
        ),
        Planted(
            "writes",
            "chosen",
            "choose",
            "_advance_kernel",
            "tl.store(chosen + row, tl.where(usable, token, -1))",
            "tl.store(chosen + row + 1, tl.where(usable, token, -1))",
        ),
    ),
}


def module_with(planted: Planted, family: str, folder: Path) -> ModuleType:
    """Import a copy of a family's file with the planted access; Triton reads its source there."""
    module = getattr(calls, family).__name__
    wrong = f"It {planted.verb} outside of {planted.parameter}."
    mutant = Mutant(family, wrong, module, planted.function, planted.find, planted.replace)
    file = folder / f"{family}.py"
    file.write_text(mutant.applied_to(source_of(module).read_text()))
    spec = spec_from_file_location(f"planted_{family}", file)
    assert spec is not None
    assert spec.loader is not None
    copy = module_from_spec(spec)
    sys.modules[spec.name] = copy  # annotations of classes are looked up there
    spec.loader.exec_module(copy)
    return copy
