"""Bugs in the Triton kernels, their launchers and their wrappers."""

from __future__ import annotations

from tests.mutants.mutant import COMPACTED, KERNELS, PER_LAYER, Mutant

_APPEND = "roseinfer.kernels.triton.append"
_CLONE = "roseinfer.kernels.triton.clone"

MUTANTS = (
    Mutant(
        "append-offsets-of-32-bits",
        "The append kernels multiply block index and stride in 32 bits.",
        _APPEND,
        "_copy_tokens",
        """
        rows = rows.to(tl.int64)[:, None, None]
        blocks = blocks.to(tl.int64)[:, None, None]
        positions = positions.to(tl.int64)[:, None, None]
        """,
        """
        rows = rows.to(tl.int64)[:, None, None]
        blocks = blocks.to(tl.int32)[:, None, None]
        positions = positions.to(tl.int64)[:, None, None]
        """,
        rows=("4", "S16"),
        targets=(),
        directed="far_appends",
    ),
    Mutant(
        "clone-offsets-of-32-bits",
        "The clone kernel multiplies the target's index and stride in 32 bits.",
        _CLONE,
        "_clone_kernel",
        "new = tl.load(target + copy).to(tl.int64)",
        "new = tl.load(target + copy).to(tl.int32)",
        rows=("4", "S16"),
        targets=(),
        directed="far_clones",
    ),
    Mutant(
        "positions-read-as-32-bits",
        "64-bit positions are read as if they had 32 bits.",
        _APPEND,
        "_identity_pos_kernel",
        """
        _copy_tokens(
            k_cache, v_cache, key, value,
            tokens, blocks, tl.load(positions + tokens, exist, other=0), exist,
            kc_b, kc_h, kc_t, kc_d, vc_b, vc_h, vc_t, vc_d,
            k_r, k_h, k_d, v_r, v_h, v_d,
            H, D, TILE_H, TILE_D,
        )
        """,
        """
        _copy_tokens(
            k_cache, v_cache, key, value,
            tokens, blocks,
            tl.load(positions.to(tl.pointer_type(tl.int32)) + tokens, exist, other=0), exist,
            kc_b, kc_h, kc_t, kc_d, vc_b, vc_h, vc_t, vc_d,
            k_r, k_h, k_d, v_r, v_h, v_d,
            H, D, TILE_H, TILE_D,
        )
        """,
        rows=("18",),
    ),
    Mutant(
        "cache-strides-ignored",
        "The append kernels assume a contiguous cache.",
        _APPEND,
        "_launch",
        """
        fixed, tiles_of_heads = _fixed_launch(
            append, k_cache.stride(), v_cache.stride(), key.stride(), value.stride(),
            *key.shape[1:], tile_n,
        )
        """,
        """
        fixed, tiles_of_heads = _fixed_launch(
            append, k_cache.contiguous().stride(), v_cache.contiguous().stride(),
            key.stride(), value.stride(),
            *key.shape[1:], tile_n,
        )
        """,
        rows=("16",),
        targets=(KERNELS,),
    ),
    Mutant(
        "value-cache-at-key-cache-strides",
        "The append kernels write values at the strides of the key cache.",
        _APPEND,
        "_launch",
        """
        fixed, tiles_of_heads = _fixed_launch(
            append, k_cache.stride(), v_cache.stride(), key.stride(), value.stride(),
            *key.shape[1:], tile_n,
        )
        """,
        """
        fixed, tiles_of_heads = _fixed_launch(
            append, k_cache.stride(), k_cache.stride(), key.stride(), value.stride(),
            *key.shape[1:], tile_n,
        )
        """,
        rows=("16", "34"),
        targets=(KERNELS,),
    ),
    Mutant(
        "values-at-key-strides",
        "The append kernels read new values at the strides of the new keys.",
        _APPEND,
        "_launch",
        """
        fixed, tiles_of_heads = _fixed_launch(
            append, k_cache.stride(), v_cache.stride(), key.stride(), value.stride(),
            *key.shape[1:], tile_n,
        )
        """,
        """
        fixed, tiles_of_heads = _fixed_launch(
            append, k_cache.stride(), v_cache.stride(), key.stride(), key.stride(),
            *key.shape[1:], tile_n,
        )
        """,
        rows=("34",),
    ),
    Mutant(
        "last-stride-ignored",
        "The append kernels assume that the last dimension of new keys is contiguous.",
        _APPEND,
        "_copy_tokens",
        "k = tl.load(key + (rows * k_r + heads * k_h + dims * k_d), inside)",
        "k = tl.load(key + (rows * k_r + heads * k_h + dims), inside)",
        rows=("16",),
    ),
    Mutant(
        "head-mask-missing",
        "The append kernels write heads that do not exist when their number is no power of two.",
        _APPEND,
        "_copy_tokens",
        "inside = (heads < H) & (dims < D) & exist[:, None, None]",
        "inside = (dims < D) & exist[:, None, None]",
        rows=("17",),
    ),
    Mutant(
        "head-size-mask-missing",
        "The append kernels write past a head whose size is no power of two.",
        _APPEND,
        "_copy_tokens",
        "inside = (heads < H) & (dims < D) & exist[:, None, None]",
        "inside = (heads < H) & exist[:, None, None]",
        rows=("9",),
    ),
    Mutant(
        "token-mask-missing",
        "The append kernels write the padding rows of a tile, to block 0.",
        _APPEND,
        "_copy_tokens",
        "inside = (heads < H) & (dims < D) & exist[:, None, None]",
        "inside = (heads < H) & (dims < D) & (exist | True)[:, None, None]",
        rows=("6",),
    ),
    Mutant(
        "head-truncated-at-the-tile",
        "The append kernels copy at most the first 128 elements of a head.",
        _APPEND,
        "_tile",
        "tile_d = 1 << (head_dim - 1).bit_length()",
        "tile_d = min(128, 1 << (head_dim - 1).bit_length())",
        rows=("9",),
    ),
    Mutant(
        "head-size-rounded-down",
        "The append kernels round the elements of a head down to a power of two.",
        _APPEND,
        "_tile",
        "tile_d = 1 << (head_dim - 1).bit_length()",
        "tile_d = 1 << (head_dim.bit_length() - 1)",
        rows=("9",),
    ),
    Mutant(
        "grid-rounded-down",
        "The grid has programs for full tiles of heads only: few heads get none.",
        _APPEND,
        "_fixed_launch",
        "return fixed, -(-num_heads // tile_h)",
        "return fixed, num_heads // tile_h",
        rows=("17",),
    ),
    Mutant(
        "one-tile-of-heads",
        "Heads beyond the first tile are not written.",
        _APPEND,
        "_fixed_launch",
        "return fixed, -(-num_heads // tile_h)",
        "return fixed, 1",
        rows=("17",),
    ),
    Mutant(
        "one-tile-of-tokens",
        "Tokens beyond the first tile are not written.",
        _APPEND,
        "_launch",
        "grid = -(-num_tokens // tile_n), tiles_of_heads, 1",
        "grid = 1, tiles_of_heads, 1",
    ),
    Mutant(
        "gather-reads-the-first-rows",
        "The gather kernel reads the first rows instead of the given ones.",
        _APPEND,
        "_gather_kernel",
        """
        _copy_tokens(
            k_cache, v_cache, key, value,
            tl.load(rows + tokens, exist, other=0), blocks,
            tl.load(positions + tokens, exist, other=0), exist,
            kc_b, kc_h, kc_t, kc_d, vc_b, vc_h, vc_t, vc_d,
            k_r, k_h, k_d, v_r, v_h, v_d,
            H, D, TILE_H, TILE_D,
        )
        """,
        """
        _copy_tokens(
            k_cache, v_cache, key, value,
            tokens, blocks,
            tl.load(positions + tokens, exist, other=0), exist,
            kc_b, kc_h, kc_t, kc_d, vc_b, vc_h, vc_t, vc_d,
            k_r, k_h, k_d, v_r, v_h, v_d,
            H, D, TILE_H, TILE_D,
        )
        """,
        rows=("31",),
        targets=(PER_LAYER, KERNELS),
    ),
    Mutant(
        "keys-stored-as-values",
        "The append kernels write the new keys to both caches.",
        _APPEND,
        "_copy_tokens",
        """
        tl.store(
            v_cache + (blocks * vc_b + positions * vc_t + heads * vc_h + dims * vc_d), v, inside
        )
        """,
        """
        tl.store(
            v_cache + (blocks * vc_b + positions * vc_t + heads * vc_h + dims * vc_d), k, inside
        )
        """,
        rows=("34",),
    ),
    Mutant(
        "first-chunk-cloned",
        "The clone kernel copies only the first chunk of a large block.",
        _CLONE,
        "_fixed_launch",
        "return fixed, -(-elements // chunk)",
        "return fixed, 1",
        rows=("8",),
    ),
    Mutant(
        "first-layer-cloned",
        "The clone kernel copies only the first layer of a group.",
        _CLONE,
        "launch_clone",
        "fixed((source.shape[0], layers, chunks), k_from, v_from, k_to, v_to, source, target)",
        "fixed((source.shape[0], 1, chunks), k_from, v_from, k_to, v_to, source, target)",
        rows=("8",),
    ),
    Mutant(
        "clone-mask-missing",
        "The clone kernel writes past a block whose size is no power of two.",
        _CLONE,
        "_clone_kernel",
        "tl.store(k_to + layer * kt_l + new * kt_b + h * kt_h + t * kt_t + d * kt_d, k, inside)",
        "tl.store(k_to + layer * kt_l + new * kt_b + h * kt_h + t * kt_t + d * kt_d, k)",
        rows=("9", "17"),
    ),
    Mutant(
        "clone-of-another-layout",
        "The clone kernel reads blocks as if a token's heads were contiguous.",
        _CLONE,
        "_clone_kernel",
        "k = tl.load(k_from + layer * kf_l + old * kf_b + h * kf_h + t * kf_t + d * kf_d, inside)",
        "k = tl.load(k_from + layer * kf_l + old * kf_b + (t * H + h) * kf_t + d * kf_d, inside)",
        rows=("8",),
    ),
    Mutant(
        "clone-values-at-key-strides",
        "The clone kernel copies values at the strides of the key cache.",
        _CLONE,
        "launch_clone",
        """
        fixed, chunks = _fixed_launch(
            k_from.stride(), v_from.stride(), k_to.stride(), v_to.stride(), *block
        )
        """,
        """
        fixed, chunks = _fixed_launch(
            k_from.stride(), k_from.stride(), k_to.stride(), k_to.stride(), *block
        )
        """,
        rows=("16", "34"),
        targets=(KERNELS,),
    ),
    Mutant(
        "chain-cloned-one-by-one",
        "Blocks that are both source and target are copied one by one, not all at once.",
        _CLONE,
        "kv_clone_triton",
        """
        if not torch.isin(source, target).any():
            ...
        """,
        """
        if source.numel():
            ...
        """,
        rows=("10",),
        targets=(COMPACTED,),
    ),
)
