"""The functions that have a warpgroup multiply, written out: an instruction names every number."""

from __future__ import annotations


def add_product(columns: int) -> str:
    """Return the function that multiplies two tiles, the second of so many rows, and adds that."""
    return f"""
template <>
DEV void multiply_places<{columns}>(float* d, TilePlace a, TilePlace b) {{
    asm volatile("{_multiply(columns)}, %{columns // 2}, %{columns // 2 + 1}, 1, 1, 1, 0, 0;"
                 : {_sums(columns)} : "l"(a), "l"(b));
}}
"""


def product(columns: int) -> str:
    """Return the function that multiplies two tiles and forgets what the sums were."""
    a, b, zero = (f"%{columns // 2 + i}" for i in range(3))
    return f"""
template <>
DEV void multiply_places_afresh<{columns}>(float* d, TilePlace a, TilePlace b) {{
    asm volatile("{{ .reg .pred add; setp.ne.b32 add, {zero}, 0;"
                 "{_multiply(columns)}, {a}, {b}, add, 1, 1, 0, 0; }}"
                 : {_sums(columns)} : "l"(a), "l"(b), "r"(0));
}}
"""


def add_product_of_held(columns: int) -> str:
    """Return the function that multiplies what threads hold by a tile.

    It adds that to the sums where they are kept, and forgets what they were elsewhere.
    """
    held = ", ".join(f"%{columns // 2 + i}" for i in range(4))
    b, kept = (f"%{columns // 2 + i}" for i in (4, 5))
    return f"""
template <>
DEV void multiply_held<{columns}>(float* d, const u32* a, TilePlace b, bool kept) {{
    asm volatile("{{ .reg .pred add; setp.ne.b32 add, {kept}, 0;"
                 "{_multiply(columns)}, {{{held}}}, {b}, add, 1, 1, 1; }}"
                 : {_sums(columns)}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)kept));
}}
"""


def _multiply(columns: int) -> str:
    """Return the instruction and the numbers that it adds to."""
    numbers = ", ".join(f"%{i}" for i in range(columns // 2))
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{numbers}}}"


def _sums(columns: int) -> str:
    return ", ".join(f'"+f"(d[{i}])' for i in range(columns // 2))
