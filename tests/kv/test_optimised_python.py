"""Checks of the cache under ``python -O``, which strips assertions."""

from __future__ import annotations

from textwrap import dedent

from tests.python_process import run_python

STRIPPED = """
from importlib.machinery import SourceFileLoader

def get_code(loader, name):
    path = loader.get_filename(name)
    return compile(loader.get_data(path), path, "exec", optimize=1)

SourceFileLoader.get_code = get_code
exec(compile({code!r}, "<stripped>", "exec", optimize=1))
"""
"""Program that compiles code and the modules it imports as ``python -O`` does."""
REJECTIONS = """
    import torch
    from roseinfer import *

    if __debug__:
        raise SystemExit("assertions were not stripped")
    kv = KVBlockManager(num_layers=2, num_heads=1, head_dim=2, block_size=2,
                        max_blocks_per_layer=4, device="cpu", dtype=torch.float32,
                        policy=AppendPolicy(triton=False))
    key = torch.ones(2, 1, 2)
    one, two = [], []
    kv.append_token_batch(0, [one, two], key, key)

    def state():
        ids = [id for id in range(8) if id % 4]
        return (kv.keys.tolist(), kv.values.tolist(), [kv.refcount(id) for id in ids],
                [str(kv.block_info(id)) for id in ids], kv.num_free_blocks(0),
                dict(kv.path_counts), [list(one), list(two)])

    def assert_rejected(error, call, *arguments):
        before = state()
        try:
            call(*arguments)
        except error as reason:
            if state() == before:
                print(error.__name__)
                return
            raise SystemExit(f"{reason}: but something changed")
        raise SystemExit(f"{call.__name__} accepted {arguments}")

    assert_rejected(OutOfBlocks, kv.append_token_batch, 0, [[], []], key, key)
    assert_rejected(BadRefcount, kv.free_blocks, 0, one * 2)
    assert_rejected(BadRefcount, kv.append_token_batch, 0, [one, list(one)], key, key)
    assert_rejected(BadBlock, kv.incref_blocks, [3])
    assert_rejected(BadBlock, kv.free_blocks, 1, one)
    assert_rejected(BadBlock, kv.append_token, 0, [99], key[0], key[0])
    assert_rejected(BadBlock, kv.append_token, 0, [0], key[0], key[0])
    assert_rejected(BadArgument, kv.append_token_batch, 0, [one, one], key, key)
    assert_rejected(BadArgument, kv.append_token_batch, 0, [one], key, key)
    assert_rejected(BadArgument, kv.append_token_batch, 0, [one, two], key.int(), key)
    assert_rejected(BadArgument, kv.append_token_batch, 0, [one, two], key, key.to("meta"))
    assert_rejected(BadArgument, kv.gather_sequence, 0, one, 2)
    assert_rejected(BadArgument, kv.append_token_batch, 2, [one, two], key, key)
    assert_rejected(ConfigError, AppendPolicy.from_env, {"ROSELLM_TRITON_KV_APPEND_MIN_BATCH": "x"})
"""


def test_invalid_input_is_rejected_without_assertions() -> None:
    rejections = run_python(STRIPPED.format(code=dedent(REJECTIONS)), warm=True).split()
    assert len(rejections) == REJECTIONS.count("assert_rejected(") - 1
    assert {"OutOfBlocks", "BadRefcount", "BadBlock", "BadArgument", "ConfigError"} <= set(
        rejections
    )
