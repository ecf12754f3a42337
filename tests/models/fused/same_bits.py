"""Logits compared bit for bit across batches: ``python -m tests.models.fused.same_bits``.

Each row of logits computed in a mix must have the bits of the row of the same token when its
request is served alone, one token at a time, by the decode kernels. Without a tolerance, rounding
hides no arithmetic bug. This needs a GPU.

The models are small. Kernels that are chosen from a minimum size on run at every size in mixes.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from roseinfer import LLM, EnginePath, SamplingParams
from roseinfer.kernels.cuda import decode_attention, paired, prefill_attention
from roseinfer.paths import AttentionPath
from tests.models.families import flatten_attention, scale_weights_up

if TYPE_CHECKING:
    from collections.abc import Iterator

Row = tuple[int, int, int]
"""A token, its position, and a checksum of its logits' bits."""
POSITIONS = 1024
NUM_REQUESTS = 20
SIZED_PATHS = (
    AttentionPath.PREFILL_CUDA,
    AttentionPath.APPEND_AND_ATTEND_CUDA,
    EnginePath.PAIRED_GEMM,
)
"""Kernels with a minimum size that need a GPU of compute capability 9."""
_HEADS = {"llama": (8, 2), "gpt2": (4, 4), "mixtral": (8, 2)}
_NETWORKS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mixtral": (MixtralForCausalLM, MixtralConfig),
}


def model_of(kin: str, device: str = "cuda") -> Any:
    """Build a small model with layers wide enough to be split."""
    torch.manual_seed(5)
    heads, kv_heads = _HEADS[kin]
    if kin == "gpt2":
        sizes = {"n_embd": 256, "n_head": heads, "n_layer": 3, "n_positions": POSITIONS}
        network: Any = GPT2LMHeadModel(GPT2Config(vocab_size=500, **sizes))
    else:
        logits_rows, config = _NETWORKS[kin]
        network = logits_rows(
            config(
                vocab_size=500, hidden_size=512, intermediate_size=1536, num_hidden_layers=3,
                num_attention_heads=heads, num_key_value_heads=kv_heads,
                max_position_embeddings=POSITIONS,
            )
        )  # fmt: skip
    return flatten_attention(scale_weights_up(network), 16).to(torch.bfloat16).to(device)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    prompt: list[int]
    max_new_tokens: int


def requests() -> list[RequestSpec]:
    """Return prompts of all lengths, many with shared prefixes.

    Some end a few tokens before a tile, a part or a block does, so that decoding crosses it, and
    some have more parts than a program reads at a time.
    """
    rng = random.Random(7)
    shared = [rng.randrange(2, 500) for _ in range(505)]
    specs = []
    for number in range(NUM_REQUESTS):
        length = rng.choice((2, 5, 17, 40, 60, 64, 125, 129, 188, 200, 252, 505))
        num_shared = rng.choice((0, length // 2, length - 1))
        suffix = [rng.randrange(2, 500) for _ in range(length - num_shared)]
        specs.append(RequestSpec(shared[:num_shared] + suffix, 4 + number % 30))
    return specs


@contextmanager
def collect_rows(llm: LLM) -> Iterator[set[Row]]:
    """Collect each row of logits except those at position 0, which padding has too.

    Passes on other caches, by which a model is checked, are left out.
    """
    model: Any = llm.engine.sequence_runner.model
    kv = llm.engine.sequence_runner.attention.kv
    compute, rows = model.logits, set[Row]()
    collected: list[torch.Tensor] = []
    width = model.shape.vocab_size
    factors = torch.randint(1 << 40, (width,), generator=torch.Generator().manual_seed(1))
    factors = (factors * 2 + 1).cuda()

    def logits(tokens: Any, positions: Any, last_rows: Any, attention: Any) -> torch.Tensor:
        logits_rows: torch.Tensor = compute(tokens, positions, last_rows, attention)
        if attention.kv is not kv:
            return logits_rows
        last = slice(None) if last_rows is None else last_rows
        # Sums of integers are exact in any order.
        bits = (logits_rows.view(torch.int16).long() * factors).sum(-1)
        collected.append(torch.stack([tokens[last], positions[last], bits]))
        return logits_rows

    model.logits = logits
    try:
        yield rows
    finally:
        del model.logits
        for token, position, bits in torch.cat(collected, 1).T.tolist():
            if position:
                rows.add((token, position, bits))


@contextmanager
def kernels_at_every_size() -> Iterator[None]:
    """Let kernels with a minimum size run at every size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paired, "_MIN_TILES", 1)
        patch.setattr(prefill_attention, "_MIN_TILES", 0)
        patch.setattr(decode_attention, "_MIN_PROGRAMS", 1)
        yield


def serve(
    network: Any, specs: list[RequestSpec], paths: Counter[str], **options: Any
) -> tuple[set[Row], list[list[int]]]:
    """Serve requests; count paths in ``paths``. Return rows of logits, and all tokens."""
    llm = LLM(
        network, device="cuda", cuda_graph=False, batch_invariant=True, max_length=POSITIONS,
        **options,
    )  # fmt: skip
    params = [SamplingParams(max_new_tokens=each.max_new_tokens, ignore_eos=True) for each in specs]
    with collect_rows(llm) as rows:
        outputs = llm.generate([each.prompt for each in specs], params)
    assert all(output.error is None for output in outputs), [each.error for each in outputs]
    paths.update(llm.engine.path_counts)
    return rows, [output.token_ids for output in outputs]


def alone(network: Any, specs: list[RequestSpec]) -> tuple[set[Row], list[list[int]]]:
    """Serve each request by itself, one prompt token at a time."""
    one = {"max_batch_size": 1, "prefill_max_tokens": 1, "prefix_cache": False}
    return serve(network, specs, Counter(), kv_cache_tokens=POSITIONS, **one)


def fingerprint(kin: str) -> int:
    """Return a number that is equal in two processes whose rows of logits have the same bits."""
    last, _ = alone(model_of(kin), requests())
    return crc32(repr(sorted(last)).encode())


def options_of(rng: random.Random) -> dict[str, Any]:
    """Draw engine options of a mix; with the smallest caches requests are preempted."""
    return {
        "max_batch_size": rng.choice((2, 5, 17, 33, 70)),
        "block_size": rng.choice((16, 32, 64)),
        "kv_cache_tokens": rng.choice((POSITIONS, 2 * POSITIONS, 16 * POSITIONS)),
        "prefill_max_tokens": rng.choice((7, 64, 100, 400, 2048)),
        "prefill_max_batch_size": rng.choice((1, 4, 40)),
        "prefix_cache": rng.random() < 0.7,
        "run_ahead": rng.randrange(4),
        "resident_decode": rng.random() < 0.8,
        "prompt_rows": rng.choice((0, 64)),
    }


def find_differences(network: Any, mixes: int, seed: int, paths: Counter[str]) -> Iterator[str]:
    """Serve mixes, and describe the first difference of each that is not served as alone."""
    specs = requests()
    expected_rows, expected_tokens = alone(network, specs)
    for number in range(mixes):
        rng = random.Random(seed * 1_000_003 + number)
        chosen = [rng.randrange(len(specs)) for _ in range(rng.randrange(1, 24))]
        options = options_of(rng)
        with kernels_at_every_size():
            last, tokens = serve(network, [specs[at] for at in chosen], paths, **options)
        differing_rows = last - expected_rows
        num_texts = sum(a != expected_tokens[at] for a, at in zip(tokens, chosen, strict=True))
        if differing_rows or num_texts:
            first = min(differing_rows, key=lambda row: row[1], default=None)
            summary = (
                f"{len(differing_rows)} of {len(last)} rows, from {first} on, and {num_texts} texts"
            )
            yield f"mix {number}: {summary}; served with {options}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kin", nargs="+", choices=_HEADS, default=[*_HEADS])
    args = parser.parse_args()
    status = 0
    for kin in args.kin:
        differing_rows = 0
        paths = Counter[str]()
        for line in find_differences(model_of(kin), args.mixes, args.seed, paths):
            differing_rows += 1
            status = 1
            print(f"{kin}: {line}", flush=True)
        print(f"{kin}: {args.mixes} mixes compared, {differing_rows} differ", flush=True)
        print("  " + ", ".join(f"{path} {paths[path]}" for path in SIZED_PATHS), flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
