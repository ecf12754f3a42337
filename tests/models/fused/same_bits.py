"""Logits compared bit for bit across batches: ``python -m tests.models.fused.same_bits``.

Every row of logits that a mix of requests computes must have the bits that the row of the same
token has where its request is served alone, one token at a time, by the decode kernels. No
tolerance is left, so a bug in arithmetic that rounding would hide is found. It takes a GPU.

The models are small. Kernels that are the fastest from some size on run in mixes at every size.
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
from tests.models.families import attending_widely, scaled_up

if TYPE_CHECKING:
    from collections.abc import Iterator

Row = tuple[int, int, int]
"""A token, its position, and what its logits' bits add up to."""
POSITIONS = 1024
NUM_REQUESTS = 20
BY_SIZE = (AttentionPath.PREFILL_CUDA, AttentionPath.APPEND_AND_ATTEND_CUDA, EnginePath.PAIRED_GEMM)
"""The kernels that take a size, and a GPU of compute capability 9."""
_HEADS = {"llama": (8, 2), "gpt2": (4, 4), "mixtral": (8, 2)}
_NETWORKS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mixtral": (MixtralForCausalLM, MixtralConfig),
}


def model_of(kin: str, device: str = "cuda") -> Any:
    """Build a small model whose layers are wide enough to be cut into parts."""
    torch.manual_seed(5)
    heads, kv_heads = _HEADS[kin]
    if kin == "gpt2":
        sizes = {"n_embd": 256, "n_head": heads, "n_layer": 3, "n_positions": POSITIONS}
        network: Any = GPT2LMHeadModel(GPT2Config(vocab_size=500, **sizes))
    else:
        made, config = _NETWORKS[kin]
        network = made(
            config(
                vocab_size=500, hidden_size=512, intermediate_size=1536, num_hidden_layers=3,
                num_attention_heads=heads, num_key_value_heads=kv_heads,
                max_position_embeddings=POSITIONS,
            )
        )  # fmt: skip
    return attending_widely(scaled_up(network), 16).to(torch.bfloat16).to(device)


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    new: int


def requests() -> list[Asked]:
    """Return prompts of all lengths, many of which begin alike.

    Some end a few tokens before a tile, a part or a block does, so that decoding gets there, and
    some have more parts than a program sees at a time.
    """
    rng = random.Random(7)
    shared = [rng.randrange(2, 500) for _ in range(505)]
    asked = []
    for number in range(NUM_REQUESTS):
        length = rng.choice((2, 5, 17, 40, 60, 64, 125, 129, 188, 200, 252, 505))
        begins = rng.choice((0, length // 2, length - 1))
        rest = [rng.randrange(2, 500) for _ in range(length - begins)]
        asked.append(Asked(shared[:begins] + rest, 4 + number % 30))
    return asked


@contextmanager
def rows_computed(llm: LLM) -> Iterator[set[Row]]:
    """Collect every row of logits, but for those at position 0, where padding stands too.

    What a model tries in caches of its own is none of the requests'.
    """
    model: Any = llm.engine.sequence_runner.model
    kv = llm.engine.sequence_runner.attention.kv
    compute, seen = model.logits, set[Row]()
    found: list[torch.Tensor] = []
    width = model.shape.vocab_size
    factors = torch.randint(1 << 40, (width,), generator=torch.Generator().manual_seed(1))
    factors = (factors * 2 + 1).cuda()

    def logits(tokens: Any, positions: Any, last_rows: Any, attention: Any) -> torch.Tensor:
        made: torch.Tensor = compute(tokens, positions, last_rows, attention)
        if attention.kv is not kv:
            return made
        rows = slice(None) if last_rows is None else last_rows
        # Sums of whole numbers are exact in any order.
        bits = (made.view(torch.int16).long() * factors).sum(-1)
        found.append(torch.stack([tokens[rows], positions[rows], bits]))
        return made

    model.logits = logits
    try:
        yield seen
    finally:
        del model.logits
        for token, position, bits in torch.cat(found, 1).T.tolist():
            if position:
                seen.add((token, position, bits))


@contextmanager
def at_every_size() -> Iterator[None]:
    """Let the kernels that take a size run without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paired, "_MIN_TILES", 1)
        patch.setattr(prefill_attention, "_MIN_TILES", 0)
        patch.setattr(decode_attention, "_MIN_PROGRAMS", 1)
        yield


def served(
    network: Any, asked: list[Asked], paths: Counter[str], **options: Any
) -> tuple[set[Row], list[list[int]]]:
    """Serve requests; count in ``paths`` what ran. Return rows of logits, and all tokens."""
    llm = LLM(
        network, device="cuda", cuda_graph=False, batch_invariant=True, max_length=POSITIONS,
        **options,
    )  # fmt: skip
    params = [SamplingParams(max_new_tokens=each.new, ignore_eos=True) for each in asked]
    with rows_computed(llm) as seen:
        outputs = llm.generate([each.prompt for each in asked], params)
    assert all(output.error is None for output in outputs), [each.error for each in outputs]
    paths.update(llm.engine.path_counts)
    return seen, [output.token_ids for output in outputs]


def alone(network: Any, asked: list[Asked]) -> tuple[set[Row], list[list[int]]]:
    """Serve each request by itself, one token of its prompt after the other."""
    one = {"max_batch_size": 1, "prefill_max_tokens": 1, "prefix_cache": False}
    return served(network, asked, Counter(), kv_cache_tokens=POSITIONS, **one)


def fingerprint(kin: str) -> int:
    """Return what two processes have in common whose rows of logits have the same bits."""
    rows, _ = alone(model_of(kin), requests())
    return crc32(repr(sorted(rows)).encode())


def options_of(rng: random.Random) -> dict[str, Any]:
    """Draw how a mix is served; with the smallest caches requests are preempted."""
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


def differing(network: Any, mixes: int, seed: int, paths: Counter[str]) -> Iterator[str]:
    """Serve mixes, and say of each that is served otherwise than alone what parted first."""
    asked = requests()
    right_rows, right_tokens = alone(network, asked)
    for number in range(mixes):
        rng = random.Random(seed * 1_000_003 + number)
        chosen = [rng.randrange(len(asked)) for _ in range(rng.randrange(1, 24))]
        options = options_of(rng)
        with at_every_size():
            rows, tokens = served(network, [asked[at] for at in chosen], paths, **options)
        wrong = rows - right_rows
        texts = sum(a != right_tokens[at] for a, at in zip(tokens, chosen, strict=True))
        if wrong or texts:
            first = min(wrong, key=lambda row: row[1], default=None)
            parted = f"{len(wrong)} of {len(rows)} rows, from {first} on, and {texts} texts"
            yield f"mix {number}: {parted}; served with {options}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kin", nargs="+", choices=_HEADS, default=[*_HEADS])
    args = parser.parse_args()
    status = 0
    for kin in args.kin:
        wrong = 0
        paths = Counter[str]()
        for line in differing(model_of(kin), args.mixes, args.seed, paths):
            wrong += 1
            status = 1
            print(f"{kin}: {line}", flush=True)
        print(f"{kin}: {args.mixes} mixes compared, {wrong} differ", flush=True)
        print("  " + ", ".join(f"{path} {paths[path]}" for path in BY_SIZE), flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
