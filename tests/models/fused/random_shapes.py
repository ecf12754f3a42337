"""Models of random shapes, each alone and in random mixes.

Command: ``python -m tests.models.fused.random_shapes``.

Every seed draws a model (family, width, heads, head size, vocabulary, layers) and requests. Tokens
and log-probabilities that a request gets in a mix must be those it gets alone, to the last bit.
A difference is a failure where the model claims to be batch invariant; others are counted.

``--seed 17 --count 1`` runs the model of seed 17 again. On a GPU in bfloat16, on a CPU in float32.
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
from tests.models.fused.same_bits import POSITIONS, at_every_size, options_of

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
    """The family of a model and its config's arguments."""

    family: str
    sizes: dict[str, Any]


class Difference(NamedTuple):
    """Texts of one mix that are not those of their requests alone."""

    claimed: bool
    text: str


class Sample(NamedTuple):
    """A prompt and its parameters."""

    prompt: list[int]
    params: SamplingParams


def shape_of(rng: random.Random) -> Shape:
    """Draw a model that is computed in a moment."""
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
    """Build a drawn model; norms and biases, which start out alike, are drawn too."""
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
    """Draw requests, many of which begin alike, some of which repeat themselves."""
    shared = [rng.randrange(vocabulary) for _ in range(400)]
    made = []
    for _ in range(_NUM_REQUESTS):
        length = rng.choice((1, 2, 5, 17, 40, 63, 64, 125, 200, 300, 400))
        begins = rng.choice((0, length // 2, length - 1))
        rest = [rng.randrange(vocabulary) for _ in range(rng.choice((3, length)))]
        prompt = (shared[:begins] + rest * length)[:length]
        params = SamplingParams(
            max_new_tokens=rng.randrange(4, 40), ignore_eos=True, logprobs=True, top_logprobs=4,
            prompt_logprobs=rng.random() < 0.25, temperature=rng.choice((0.0, 0.0, 0.8)),
            seed=rng.randrange(1 << 30),
        )  # fmt: skip
        made.append(Sample(prompt, params))
    return made


def outcomes(llm: LLM, asked: list[Sample]) -> list[str]:
    """Return all that requests get; a float's text has all of its bits."""
    found = llm.generate([each.prompt for each in asked], [each.params for each in asked])
    for output in found:
        assert output.error is None, output.error
    return [
        repr((each.token_ids, each.logprobs, each.top_logprobs, each.prompt_logprobs))
        for each in found
    ]


def differences(network: Any, seed: int, mixes: int, device: str) -> Iterator[Difference]:
    """Serve mixes; yield for each its difference, with an empty text for none."""
    rng = random.Random(seed * 1_000_003 + 1)
    places: dict[str, Any] = {"device": device, "max_length": POSITIONS}
    one = LLM(network, max_batch_size=1, prefix_cache=False, kv_cache_tokens=POSITIONS, **places)
    asked = requests(rng, network.config.vocab_size)
    alone = [outcomes(one, [each])[0] for each in asked]
    claimed = one.batch_invariant
    for number in range(mixes):
        chosen = [rng.randrange(len(asked)) for _ in range(rng.randrange(2, 20))]
        options = options_of(rng) | {"speculation": rng.choice((None, "ngram"))}
        if device == "cuda":
            options["cuda_graph"] = rng.random() < 0.5
        with at_every_size() if rng.random() < 0.5 else nullcontext():
            llm = LLM(network, **options, **places)
            got = outcomes(llm, [asked[at] for at in chosen])
        wrong = [at for at, text in zip(chosen, got, strict=True) if text != alone[at]]
        both = claimed and llm.batch_invariant
        text = f"{len(wrong)} of {len(chosen)} texts, those of requests {sorted({*wrong})}"
        yield Difference(both, f"mix {number}: {text}; {options}" if wrong else "")


def run(seed: int, mixes: int, device: str) -> list[Difference]:
    """Draw a model, serve its mixes and print what came of it."""
    shape = shape_of(random.Random(seed))
    try:
        network = model_of(shape, seed, device)
        found = list(differences(network, seed, mixes, device))
    except Exception:
        found = [Difference(claimed=True, text=traceback.format_exc())]
    claims = sum(each.claimed for each in found)
    wrong = [each for each in found if each.text]
    print(f"seed {seed}: {shape.family} {shape.sizes}", flush=True)
    print(f"  {len(found)} mixes, {claims} claimed, {len(wrong)} differ", flush=True)
    for each in wrong:
        print(f"  {'FAILED' if each.claimed else 'not claimed'}: {each.text}", flush=True)
    gc.collect()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=250, help="models to draw")
    parser.add_argument("--mixes", type=int, default=2, help="mixes of each model")
    parser.add_argument("--seed", type=int, default=0, help="the first model's; then one more each")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    found = []
    for seed in range(args.seed, args.seed + args.count):
        found += run(seed, args.mixes, args.device)
    failed = sum(each.claimed and bool(each.text) for each in found)
    claimed = sum(each.claimed for each in found)
    others = sum(bool(each.text) and not each.claimed for each in found)
    total = f"{len(found)} mixes of {args.count} models from seed {args.seed} on"
    print(f"{total}: {claimed} claimed, {failed} of them differ; {others} of the others do")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
