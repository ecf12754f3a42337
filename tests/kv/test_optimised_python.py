"""The cache's checks work under ``python -O``, which strips assertions."""

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
REFUSALS = """
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

    def refused(error, call, *arguments):
        before = state()
        try:
            call(*arguments)
        except error as reason:
            if state() == before:
                print(error.__name__)
                return
            raise SystemExit(f"{reason}: but something changed")
        raise SystemExit(f"{call.__name__} accepted {arguments}")

    refused(OutOfBlocks, kv.append_token_batch, 0, [[], []], key, key)
    refused(BadRefcount, kv.free_blocks, 0, one * 2)
    refused(BadRefcount, kv.append_token_batch, 0, [one, list(one)], key, key)
    refused(BadBlock, kv.incref_blocks, [3])
    refused(BadBlock, kv.free_blocks, 1, one)
    refused(BadBlock, kv.append_token, 0, [99], key[0], key[0])
    refused(BadBlock, kv.append_token, 0, [0], key[0], key[0])
    refused(BadArgument, kv.append_token_batch, 0, [one, one], key, key)
    refused(BadArgument, kv.append_token_batch, 0, [one], key, key)
    refused(BadArgument, kv.append_token_batch, 0, [one, two], key.int(), key)
    refused(BadArgument, kv.append_token_batch, 0, [one, two], key, key.to("meta"))
    refused(BadArgument, kv.gather_sequence, 0, one, 2)
    refused(BadArgument, kv.append_token_batch, 2, [one, two], key, key)
    refused(ConfigError, AppendPolicy.from_env, {"ROSELLM_TRITON_KV_APPEND_MIN_BATCH": "x"})
"""


def test_bad_input_is_refused_without_assertions_too() -> None:
    refusals = run_python(STRIPPED.format(code=dedent(REFUSALS)), warm=True).split()
    assert len(refusals) == REFUSALS.count("refused(") - 1
    assert {"OutOfBlocks", "BadRefcount", "BadBlock", "BadArgument", "ConfigError"} <= set(refusals)
