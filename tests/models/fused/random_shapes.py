"""Models of random shapes, whose requests run alone and in random mixes.

Command: ``python -m tests.models.fused.random_shapes``.

Each seed draws a model (family, width, heads, head size, vocabulary, layers) and requests. Tokens
and logprobs of a request in a mix must equal those of the request alone, to the last bit. A
difference is a failure if the model claims to be batch invariant; others are counted. ``--seed 17
--count 1`` runs the model of seed 17 again. GPUs use bfloat16, CPUs float32.
"""

from __future__ import annotations

import argparse
import gc
import random
import traceback
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

from roseinfer import LLM, SamplingParams
from tests.models.fused.same_bits import POSITIONS, kernels_at_every_size, options_of

if TYPE_CHECKING:
    from collections.abc import Iterator

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "mixtral", "olmo2", "gpt2", "gemma2",
)  # fmt: skip
_VOCABULARIES = (257, 500, 1000, 4099, 32000, 32001, 49155, 50257, 50304)
_WIDTHS = (64, 96, 128, 192, 200, 256, 320, 384, 512, 576, 768, 896, 1024)
_HEAD_SIZES = (16, 32, 48, 64, 80, 96, 128)
_NUM_REQUESTS = 7


class Shape(NamedTuple):
    """Family of a model and the arguments of its config."""

    family: str
    sizes: dict[str, Any]


class Difference(NamedTuple):
    """Outcomes of a mix that differ from those of its requests alone."""

    claimed: bool
    summary: str


class Sample(NamedTuple):
    """Prompt with its sampling parameters."""

    prompt: list[int]
    params: SamplingParams


def shape_of(rng: random.Random) -> Shape:
    """Draw a small model."""
    family = rng.choice(FAMILIES)
    head_size, width = rng.choice(_HEAD_SIZES), rng.choice(_WIDTHS)
    heads = rng.choice([each for each in (1, 2, 3, 4, 6, 8, 12, 16) if width % each == 0])
    kv_heads = rng.choice([each for each in range(1, heads + 1) if heads % each == 0])
    sizes: dict[str, Any] = {
        "vocab_size": rng.choice((*_VOCABULARIES, rng.randrange(300, 60000))),
        "tie_word_embeddings": rng.random() < 0.5,
        "initializer_range": rng.choice((0.02, 0.05, 0.15)),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    inner = rng.choice((2 * width, 4 * width, rng.randrange(8, 256) * 16))
    if family == "gpt2":
        heads = rng.choice([each for each in (1, 2, 3, 4, 8, 12) if each * head_size <= 1024])
        names = {"n_embd": heads * head_size, "n_head": heads, "n_inner": inner}
        own = {**names, "n_layer": rng.randrange(1, 5), "n_positions": POSITIONS}
        return Shape(family, {**sizes, **own})
    sizes |= {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": rng.randrange(1, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": POSITIONS,
    }
    if family in ("mistral", "gemma2"):
        sizes["sliding_window"] = rng.choice((16, 60, 64, 200))
    if family == "mistral" and rng.random() < 0.5:
        sizes["sliding_window"] = None
    if family == "mixtral":
        sizes["num_local_experts"] = rng.choice((2, 4, 8))
        sizes["num_experts_per_tok"] = rng.choice((1, 2))
        sizes["intermediate_size"] = rng.choice((64, 192, 256, 512))
    if family == "granite":
        factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0}
        sizes |= {**factors, "attention_multiplier": head_size**-0.5}
    return Shape(family, sizes)


def model_of(shape: Shape, seed: int, device: str) -> Any:
    """Build a drawn model; norms and biases, which are initialized to constants, are drawn too."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(shape.family, **shape.sizes)
    with torch.device(device):
        network = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in network.parameters():
                if weight.dim() == 1:
                    weight.add_(torch.randn_like(weight), alpha=0.1)
    return network.eval().to(torch.bfloat16 if device == "cuda" else torch.float32)


def requests(rng: random.Random, vocabulary: int) -> list[Sample]:
    """Draw requests, many with shared prefixes and some with repetitions."""
    shared = [rng.randrange(vocabulary) for _ in range(400)]
    samples = []
    for _ in range(_NUM_REQUESTS):
        length = rng.choice((1, 2, 5, 17, 40, 63, 64, 125, 200, 300, 400))
        num_shared = rng.choice((0, length // 2, length - 1))
        suffix = [rng.randrange(vocabulary) for _ in range(rng.choice((3, length)))]
        prompt = (shared[:num_shared] + suffix * length)[:length]
        params = SamplingParams(
            max_new_tokens=rng.randrange(4, 40), ignore_eos=True, logprobs=True, top_logprobs=4,
            prompt_logprobs=rng.random() < 0.25, temperature=rng.choice((0.0, 0.0, 0.8)),
            seed=rng.randrange(1 << 30),
        )  # fmt: skip
        samples.append(Sample(prompt, params))
    return samples


def outcomes(llm: LLM, samples: list[Sample]) -> list[str]:
    """Return all results of requests as text; a float's text has all of its bits."""
    results = llm.generate([each.prompt for each in samples], [each.params for each in samples])
    for output in results:
        assert output.error is None, output.error
    return [
        repr((each.token_ids, each.logprobs, each.top_logprobs, each.prompt_logprobs))
        for each in results
    ]


def differences(network: Any, seed: int, mixes: int, device: str) -> Iterator[Difference]:
    """Serve mixes; yield the difference of each, with an empty text for none."""
    rng = random.Random(seed * 1_000_003 + 1)
    common: dict[str, Any] = {"device": device, "max_length": POSITIONS}
    single = LLM(network, max_batch_size=1, prefix_cache=False, kv_cache_tokens=POSITIONS, **common)
    samples = requests(rng, network.config.vocab_size)
    alone_outcomes = [outcomes(single, [each])[0] for each in samples]
    claimed = single.batch_invariant
    for number in range(mixes):
        chosen = [rng.randrange(len(samples)) for _ in range(rng.randrange(2, 20))]
        options = options_of(rng) | {"speculation": rng.choice((None, "ngram"))}
        if device == "cuda":
            options["cuda_graph"] = rng.random() < 0.5
        with kernels_at_every_size() if rng.random() < 0.5 else nullcontext():
            llm = LLM(network, **options, **common)
            mix_outcomes = outcomes(llm, [samples[at] for at in chosen])
        differing = [
            at
            for at, summary in zip(chosen, mix_outcomes, strict=True)
            if summary != alone_outcomes[at]
        ]
        both = claimed and llm.batch_invariant
        summary = (
            f"{len(differing)} of {len(chosen)} texts, those of requests {sorted({*differing})}"
        )
        yield Difference(both, f"mix {number}: {summary}; {options}" if differing else "")


def run(seed: int, mixes: int, device: str) -> list[Difference]:
    """Draw a model, serve its mixes and print the result."""
    shape = shape_of(random.Random(seed))
    try:
        network = model_of(shape, seed, device)
        results = list(differences(network, seed, mixes, device))
    except Exception:
        results = [Difference(claimed=True, summary=traceback.format_exc())]
    claims = sum(each.claimed for each in results)
    differing = [each for each in results if each.summary]
    print(f"seed {seed}: {shape.family} {shape.sizes}", flush=True)
    print(f"  {len(results)} mixes, {claims} claimed, {len(differing)} differ", flush=True)
    for each in differing:
        print(f"  {'FAILED' if each.claimed else 'not claimed'}: {each.summary}", flush=True)
    gc.collect()
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=250, help="models to draw")
    parser.add_argument("--mixes", type=int, default=2, help="mixes of each model")
    parser.add_argument("--seed", type=int, default=0, help="the first model's; then one more each")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    results = []
    for seed in range(args.seed, args.seed + args.count):
        results += run(seed, args.mixes, args.device)
    failed = sum(each.claimed and bool(each.summary) for each in results)
    claimed = sum(each.claimed for each in results)
    others = sum(bool(each.summary) and not each.claimed for each in results)
    total = f"{len(results)} mixes of {args.count} models from seed {args.seed} on"
    print(f"{total}: {claimed} claimed, {failed} of them differ; {others} of the others do")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
