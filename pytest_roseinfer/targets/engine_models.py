"""Small models for tests of engines, by name, with tokenizers and slow references.

Transformers takes seconds to import, so it is imported when the first model is built.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders

from pytest_roseinfer.engine_capabilities.sampling import distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.engine import RequestMix, Sampling
    from pytest_roseinfer.engine_capabilities.capability import Floats

# Shapes and traits of the models.


VOCABULARY = 32
EOS_TOKEN = 5
SECOND_EOS_TOKEN = 6
EOS_TOKENS = (EOS_TOKEN, SECOND_EOS_TOKEN)
"""Tokens that end a text; the models of many checkpoints have two or three."""
MAX_TOKENS = 48
"""Most tokens of a usual request, so that the slow twin's outputs are computed quickly."""
POSITIONS = 160
"""Positions of a model: enough for a few contexts that kernels split into parts."""
PADDED_VOCABULARY = "odd llama"
"""Model with one token more than the others, so that its LM head is padded."""
PART_TOKENS = 128
"""Tokens of the first parts into which kernels split a context."""
LONG_POSITIONS = 1300

ALIBI = "sloped bloom"
"""Model with ALiBi: a bias on scores that grows with the distance of query and key."""
AS_INITIALISED = "llama as initialised"
"""Model with the weights of transformers' initialisation, whose tokens hardly show an error."""
_Shape = tuple[str, int, int, int]
"""Family, query heads, KV heads and head size."""
_SHORT: dict[str, _Shape] = {
    "gpt2": ("gpt2", 2, 2, 12),
    "llama": ("llama", 4, 2, 6),
    PADDED_VOCABULARY: ("llama", 4, 2, 6),
    "llama 10:2": ("llama", 10, 2, 6),
    "llama 24:3": ("llama", 24, 3, 6),
    "llama 32:2": ("llama", 32, 2, 6),
    ALIBI: ("bloom", 8, 8, 6),  # with more heads, slopes are steeper
    "mixtral": ("mixtral", 4, 2, 6),
    AS_INITIALISED: ("llama", 4, 2, 6),
}
LONG: dict[str, _Shape] = {
    "gpt2 1x16": ("gpt2", 1, 1, 16),
    "llama 32:2x16": ("llama", 32, 2, 16),
    "qwen3 4:4x16": ("qwen3", 4, 4, 16),
    "gpt2 3x80": ("gpt2", 3, 3, 80),
    "gpt2 12x64": ("gpt2", 12, 12, 64),
    "llama 1:1x32": ("llama", 1, 1, 32),
    "llama 8:1x64": ("llama", 8, 1, 64),
    "llama 10:2x64": ("llama", 10, 2, 64),
    "llama 4:2x256": ("llama", 4, 2, 256),
    "llama 6:3x80": ("llama", 6, 3, 80),
    "qwen3 16:8x128": ("qwen3", 16, 8, 128),
    "qwen3 16:1x64": ("qwen3", 16, 1, 64),
}
HYBRID = "half windowed qwen3"
"""Model with one layer that attends to all tokens, and one to the last ``WINDOW``."""
TWO_GROUPS = "twice windowed qwen3"
"""Model with one layer that attends to all tokens, and two of one window, each in its own group."""
SOFTCAP = "capped gemma2"
ATTENTION_SINKS = "gpt-oss with sinks"
"""Model with attention sinks; here and in ``SOFTCAP`` too, every second layer has a window."""
_WINDOWED: dict[str, _Shape] = {
    "windowed mistral": ("mistral", 4, 2, 6),
    HYBRID: ("qwen3", 4, 2, 6),
    SOFTCAP: ("gemma2", 4, 2, 6),
    ATTENTION_SINKS: ("gpt_oss", 4, 2, 6),
    TWO_GROUPS: ("qwen3", 4, 2, 6),
}
_FAMILY_TRAITS: dict[str, dict[str, Any]] = {
    # Default scores are scaled for heads of 256, and too small for the cap to have an effect.
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 6},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    # Steps with few rows leave experts unused, and those with more rows use some experts twice.
    "mixtral": {"num_local_experts": 7, "num_experts_per_tok": 2},
}
SMALL = tuple(_SHORT)
WITH_WINDOWS_ALONE = ("windowed mistral", HYBRID)
WINDOWED = tuple(_WINDOWED)
"""Models whose layers, or every second one, attend to the last ``WINDOW`` tokens."""
WINDOW = 5
_WINDOWS = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
OF_MANY_SHAPES = tuple(LONG)
"""Models with the shapes that kernels depend on: 1 to 16 query heads per KV head, and head sizes of
16 to 256. Models whose kernels compile fastest come first."""


def config(name: str) -> Any:
    """Return the config of a model; the first call imports transformers, which takes seconds."""
    from transformers import AutoConfig

    family, heads, kv_heads, head_dim = (_SHORT | _WINDOWED | LONG)[name]
    positions = LONG_POSITIONS if name in LONG else POSITIONS
    tokens = {
        "vocab_size": VOCABULARY + (name == PADDED_VOCABULARY),
        "bos_token_id": EOS_TOKEN,
        "eos_token_id": [*EOS_TOKENS],
    }
    if family == "gpt2":
        sizes = {"n_positions": positions, "n_embd": heads * head_dim, "n_head": heads}
        return AutoConfig.for_model(family, n_layer=2, **sizes, **tokens)
    if family == "bloom":
        sizes = {"seq_length": positions, "hidden_size": heads * head_dim, "n_head": heads}
        return AutoConfig.for_model(family, n_layer=2, **sizes, **tokens)
    return AutoConfig.for_model(
        family,
        hidden_size=24 if 24 % heads == 0 else 2 * heads,
        intermediate_size=32,
        num_hidden_layers=2 + (name == TWO_GROUPS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        **tokens,
        **(_WINDOWS if name in _WINDOWED else {}),
        **_FAMILY_TRAITS.get(family, {}),
    )


_FELT_SINK = 8.0


def network(name: str, device: str) -> Any:
    """Build a model with fixed weights, which are so large that the argmax is never a tie.

    Only those of ``AS_INITIALISED`` are left as they are.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config(name)).eval().requires_grad_(False)
        if name == AS_INITIALISED:
            return model.to(device)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.4 * min(1, 96 / weight.shape[-1]) ** 0.5)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # initialised to biases of 0 and gains of 1
                weight.add_(0.2 * torch.randn(weight.shape))
            if name.endswith("sinks"):  # default sinks are negligible compared with such scores
                weight.add_(_FELT_SINK)
    return model.to(device)


# Engines may modify the network that they serve, so the slow twin has its own.
@lru_cache(maxsize=16)
def _eager_network(name: str, device: str) -> Any:
    model = network(name, device)
    model.set_attn_implementation("eager")  # torch's own attention ignores softcaps
    return model


_MAX_CONTEXTS = 1 << 15
_known_logits: dict[tuple[str, str, tuple[int, ...]], Floats] = {}
"""Logits of the next token, by model, device and context."""


def logits(name: str, device: str, tokens: tuple[int, ...]) -> Floats:
    """Return the logits of the next token, computed from all tokens without a cache."""
    _compute_logits(name, device, [tokens])
    return _known_logits[name, device, tokens]


def _compute_logits(name: str, device: str, contexts: Sequence[tuple[int, ...]]) -> None:
    """Compute those logits that are not known yet, of all contexts and their beginnings."""
    if len(_known_logits) > _MAX_CONTEXTS:
        _known_logits.clear()
    new = [each for each in dict.fromkeys(contexts) if (name, device, each) not in _known_logits]
    if not new:
        return
    # Small models run on the CPU, because processes that share a GPU wait for each other.
    model = _eager_network(name, device if name in LONG else "cpu")
    longest = max(map(len, new))
    # Padding comes last, where no token attends to it.
    padded = torch.tensor([[*each, *[0] * (longest - len(each))] for each in new])
    with torch.inference_mode():
        output = model(padded.to(model.device), use_cache=False)
    for tokens, rows in zip(new, output.logits.double().cpu().numpy(), strict=True):
        for end in range(1, len(tokens) + 1):
            _known_logits.setdefault((name, device, tokens[:end]), rows[end - 1])


# Small tokenizers for the models.


_END, _SECOND_END = "<end>", "<end of turn>"
_BYTES = ("a", "b", "Ġ", "ab", "Ã", "©", "é", "â", "Ĥ", "¬", "âĤ", "ba", "Ġa", "ðŁ", "ĺ", "Ģ", "c")
"""Pieces in GPT-2's byte alphabet: letters, a space, and parts of multi-byte characters."""
_WORDS = ("▁a", "▁b", "a", "b", "▁", "ab", "▁ab", "é", "▁ba", "c")


@lru_cache
def tokenizer(*, byte_level: bool) -> Any:
    """Build a byte-level tokenizer, or one whose pieces mark the starts of words."""
    if byte_level:
        return _build_tokenizer(_BYTES, decoders.ByteLevel())
    return _build_tokenizer(_WORDS, decoders.Metaspace())


def text_of(tokens: Sequence[int], by: Any) -> str:
    """Decode all tokens of a request with one of these tokenizers."""
    text: str = by.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def _build_tokenizer(pieces: Sequence[str], decoder: Any) -> Any:
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    others = (token for token in range(VOCABULARY) if token not in EOS_TOKENS)
    written = {token: f"{pieces[at % len(pieces)]}" for at, token in enumerate(others)}
    for at, token in enumerate(sorted(written)[len(pieces) :]):
        written[token] = chr(ord("A") + at)
    ends = dict(zip((_END, _SECOND_END), EOS_TOKENS, strict=True))
    vocabulary = {text: token for token, text in written.items()} | ends
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_END))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=_END,
        additional_special_tokens=[_SECOND_END],
        clean_up_tokenization_spaces=False,
    )


# roseinfer's sampling, reimplemented in numpy: the noise of a token is a hash of its position.


_WORD = (1 << 64) - 1


def draw(logits: Floats, sampling: Sampling, tokens: Sequence[int], prompted: int) -> int:
    """Sample the token after ``tokens``; the first ``prompted`` are the prompt."""
    likely = distribution(logits, sampling, tokens, prompted)
    place = _scramble(_scramble(sampling.seed & _WORD) + len(tokens))
    hashes = [_scramble(place + token) >> 40 for token in range(len(likely))]
    noise = -np.log(-np.log((np.array(hashes) + 0.5) / (1 << 24)))
    return int((likely + noise).argmax())


def _scramble(number: int) -> int:
    """Mix 64 bits by SplitMix64, with its published constants."""
    number = (number + 0x9E3779B97F4A7C15) & _WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _WORD
    return number ^ (number >> 31)


# Reference outputs: without a cache, batches, or roseinfer's code.


@lru_cache(maxsize=4096)
def generate_alone(
    name: str, device: str, prompt: tuple[int, ...], sampling: Sampling
) -> tuple[int, ...]:
    """Generate tokens, each computed from all previous ones."""
    (tokens,) = _generate(name, device, [(prompt, sampling)])
    return tuple(tokens[len(prompt) :])


def compute_logits_of(mix: RequestMix) -> None:
    """Compute all logits that ``generate_alone`` needs for a mix of short requests.

    One call of the model has a row per request, which takes about as long as a call for one.
    """
    if mix.options["model"] not in LONG:
        requests = [(each.prompt, each.sampling) for each in mix.requests]
        _generate(mix.options["model"], mix.device, requests)


def _generate(
    name: str, device: str, requests: Sequence[tuple[tuple[int, ...], Sampling]]
) -> list[list[int]]:
    """Return the prompts with the tokens that each gets alone."""
    positions = LONG_POSITIONS if name in OF_MANY_SHAPES else POSITIONS
    texts = [list(prompt) for prompt, _ in requests]

    def is_open(tokens: list[int], prompted: int, sampling: Sampling) -> bool:
        return len(tokens) < positions and is_unfinished(tokens, prompted, sampling)

    going = [
        (tokens, len(prompt), sampling)
        for tokens, (prompt, sampling) in zip(texts, requests, strict=True)
    ]
    while going := [each for each in going if is_open(*each)]:
        _compute_logits(name, device, [tuple(tokens) for tokens, *_ in going])
        for tokens, prompted, sampling in going:
            row = logits(name, device, tuple(tokens))
            tokens.append(draw(row, sampling, tokens, prompted))
    return texts


def is_unfinished(tokens: Sequence[int], prompted: int, sampling: Sampling) -> bool:
    """Return True if a request goes on after these tokens, which include its prompt."""
    new = tokens[prompted:]
    ended = bool(new) and new[-1] in EOS_TOKENS and not sampling.ignore_eos
    return len(new) < sampling.max_new_tokens and not ended


def is_near_tie(
    mix: RequestMix, tokens: tuple[int, ...], sampling: Sampling, rounding: float
) -> bool:
    """Return True if a relative error of ``rounding`` in the logits could change the token.

    Any request of the mix whose prompt these tokens start with is considered.
    """
    prompts = {len(each.prompt) for each in mix.requests if starts_with_prompt(each.prompt, tokens)}
    row = logits(mix.options["model"], mix.device, tokens)
    noise = np.random.default_rng(0).standard_normal((16, len(row)))
    nearly = row + noise * np.abs(row).max() * rounding
    return any(
        len({draw(each, sampling, tokens, prompted) for each in (row, *nearly)}) > 1
        for prompted in prompts
    )


def starts_with_prompt(prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    return tuple(tokens[: len(prompt)]) == tuple(prompt)
