"""An access out of bounds for each family of kernels: a read and a write.

The reads change no answer: what they bring is masked later, or never stored.
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
    """Text of a kernel's file, what takes its place, and the call that then is out of bounds."""

    verb: str
    parameter: str
    call: str
    find: str
    replace: str


FAMILIES: dict[str, tuple[Planted, Planted]] = {
    "append": (
        Planted(
            "reads",
            "key",
            "append in order",
            "    k = tl.load(key + (rows * k_r + heads * k_h + dims * k_d), inside)\n",
            "    k = tl.load(\n"
            "        key + (rows * k_r + heads * k_h + dims * k_d), (heads < H) & (dims < D)\n"
            "    )\n",
        ),
        Planted(
            "writes",
            "v_cache",
            "append",
            "heads * vc_h + dims * vc_d), v, inside)",
            "heads * vc_h + dims * vc_d), v, (dims < D) & exist[:, None, None])",
        ),
    ),
    "clone": (
        Planted(
            "reads",
            "k_from",
            "clone between pools",
            "t * kf_t + d * kf_d, inside)",
            "t * kf_t + d * kf_d)",
        ),
        Planted("writes", "v_to", "clone", "d * vt_d, v, inside)", "d * vt_d, v)"),
    ),
    "attend_decode": (
        Planted(
            "reads",
            "tables",
            "attend",
            "tl.load(table + tokens // BLOCK, stored, other=0)",
            "tl.load(table + tokens // BLOCK)",
        ),
        Planted(
            "writes",
            "out",
            "attend",
            "(all_sums / all_total[:, None]).to(out.dtype.element_ty), q_inside,",
            "(all_sums / all_total[:, None]).to(out.dtype.element_ty), d_inside[None, :],",
        ),
    ),
    "attend_parts": (
        Planted(
            "reads",
            "weights_sum",
            "combine",
            "tl.load(weights_sum + row + at + one, there, other=0.0)",
            "tl.load(weights_sum + row + at + one)",
        ),
        Planted(
            "writes",
            "out",
            "combine",
            "out.dtype.element_ty), inside,",
            "out.dtype.element_ty), dims >= 0,",
        ),
    ),
    "attend_chunks": (
        Planted(
            "reads",
            "tables",
            "chunks",
            "tokens // BLOCK, inside, other=0).to(",
            "tokens // BLOCK).to(",
        ),
        Planted(
            "writes",
            "out",
            "chunks",
            "(all_sums / all_total[:, None]).to(out.dtype.element_ty), there[:, None] & d_inside,",
            "(all_sums / all_total[:, None]).to(out.dtype.element_ty), real[:, None] & d_inside,",
        ),
    ),
    "linear": (
        Planted(
            "reads",
            "bias",
            "linear",
            "tl.load(bias + n, n < N, other=0.0)",
            "tl.load(bias + n)",
        ),
        Planted(
            "writes",
            "out",
            "linear in parts",
            "total, x_in & (n < N)[None, :]",
            "total, (n < N)[None, :]",
        ),
    ),
    "streamed": (
        Planted(
            "reads",
            "x",
            "streamed",
            "tl.load(x_rows + k[:, None], x_tile, other=0.0)",
            "tl.load(x_rows + k[:, None], (k < K)[:, None], other=0.0)",
        ),
        Planted(
            "writes",
            "out",
            "streamed in parts",
            "total.to(out.dtype.element_ty), w_in & x_in,",
            "total.to(out.dtype.element_ty), w_in,",
        ),
    ),
    "gated": (
        Planted(
            "reads",
            "x",
            "gated",
            "tl.load(x_rows + k[:, None], x_tile, other=0.0)",
            "tl.load(x_rows + k[:, None], (k < K)[:, None], other=0.0)",
        ),
        Planted(
            "writes",
            "out",
            "gated at once",
            "gated(gate, up, out.dtype.element_ty), n < N)",
            "gated(gate, up, out.dtype.element_ty))",
        ),
    ),
    "choice": (
        Planted(
            "reads",
            "parts",
            "choose experts",
            "tl.load(parts + part * p_p + row * p_r + n, inside, other=0.0)",
            "tl.load(parts + part * p_p + row * p_r + n)",
        ),
        Planted(
            "writes",
            "weights",
            "choose experts",
            "counts.to(weights.dtype.element_ty), m < MOST)",
            "counts.to(weights.dtype.element_ty))",
        ),
    ),
    "visiting": (
        Planted(
            "reads",
            "weight",
            "visit experts by many rows",
            "tl.load(w_rows + k[None, :], w_tile, other=0.0)",
            "tl.load(w_rows + k[None, :], (k < K)[None, :], other=0.0)",
        ),
        Planted(
            "writes",
            "out",
            "visit experts by many rows",
            "gated(gate, up, out.dtype.element_ty), w_in & x_in",
            "gated(gate, up, out.dtype.element_ty), x_in & (n >= 0)[:, None]",
        ),
    ),
    "norm": (
        Planted(
            "reads",
            "gain",
            "norm",
            "    g = tl.load(gain + n, inside, other=0.0)",
            "    g = tl.load(gain + n)",
        ),
        Planted(
            "writes",
            "normed",
            "embed",
            "    scaled += tl.load(shift + n, inside, other=0.0).to(tl.float32)\n"
            "    tl.store(normed + row * n_r + n, scaled.to(normed.dtype.element_ty), inside)\n",
            "    scaled += tl.load(shift + n, inside, other=0.0).to(tl.float32)\n"
            "    tl.store(normed + row * n_r + n, scaled.to(normed.dtype.element_ty))\n",
        ),
    ),
    "rms_norm": (
        Planted(
            "reads",
            "residual",
            "norm by the root mean square behind",
            "    x = tl.load(residual + row * r_r + n, inside, other=0.0).to(tl.float32)\n"
            "    x = x + total.to(dtype)",
            "    x = tl.load(residual + row * r_r + n).to(tl.float32)\n    x = x + total.to(dtype)",
        ),
        Planted(
            "writes",
            "residual",
            "embed by the root mean square",
            "    tl.store(residual + row * r_r + n, x, inside)\n    g = ",
            "    tl.store(residual + row * r_r + n, x)\n    g = ",
        ),
    ),
    "rotary": (
        Planted(
            "reads",
            "key",
            "rotate",
            "tl.load(heads[:, None] + dims[None, :], inside, other=0.0)",
            "tl.load(heads[:, None] + dims[None, :], (at < HEADS)[:, None], other=0.0)",
        ),
        Planted(
            "writes",
            "query",
            "rotate",
            "        (q < Q_HEADS)[:, None] & whole,\n",
            "        (q < Q_HEADS)[:, None],\n",
        ),
    ),
    "likeliest": (
        Planted(
            "reads",
            "place",
            "choose",
            "tl.load(place + row * strips + strip, inside, other=N)",
            "tl.load(place + row * strips + strip)",
        ),
        Planted(
            "writes", "chosen", "choose", "tl.store(chosen + row,", "tl.store(chosen + row + 1,"
        ),
    ),
}


def module_with(planted: Planted, family: str, folder: Path) -> ModuleType:
    """Import a copy of a family's file with the access in it; Triton reads its kernels there."""
    module = getattr(calls, family).__name__
    wrong = f"It {planted.verb} outside of {planted.parameter}."
    mutant = Mutant(family, wrong, module, planted.find, planted.replace)
    file = folder / f"{family}.py"
    file.write_text(mutant.applied_to(source_of(module).read_text()))
    spec = spec_from_file_location(f"planted_{family}", file)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    sys.modules[spec.name] = made  # annotations of classes are looked up there
    spec.loader.exec_module(made)
    return made
