"""The command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from roseinfer.config import require_device, require_dtype
from roseinfer.errors import ConfigError, did_you_mean
from roseinfer.models.source import locate
from roseinfer.progress import say
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from roseinfer.bench.driving import Run

# The architectures that ``--random-weights`` knows, by name, without torch.


class _Architecture(NamedTuple):
    config: str
    """A class of transformers."""
    sizes: dict[str, Any]
    """What differs from its defaults."""


ARCHITECTURES = {
    "gpt2": _Architecture("GPT2Config", {}),
    "llama-1b": _Architecture(
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "llama-8b": _Architecture(
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-0.6b": _Architecture(
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2-1b": _Architecture(
        "Olmo2Config",
        {
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    ),
    # Each token visits 8 of 64 experts.
    "olmoe-1b-7b": _Architecture(
        "OlmoeConfig",
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
        },
    ),
    # One of a family for which there are no fused kernels.
    "pythia-410m": _Architecture(
        "GPTNeoXConfig",
        {
            "vocab_size": 50304,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
        },
    ),
}


def architecture(name: str) -> Any:
    """Configure a model, whose texts end with the token of the byte-level tokenizer."""
    require_architecture(name)
    import transformers

    from roseinfer.models.tiny import END

    kind, sizes = ARCHITECTURES[name]
    return getattr(transformers, kind)(**sizes, bos_token_id=END, eos_token_id=END)


def require_architecture(name: str) -> None:
    if name not in ARCHITECTURES:
        known, alike = ", ".join(ARCHITECTURES), did_you_mean(name, ARCHITECTURES)
        raise ConfigError(f"--random-weights knows the architectures {known}, not {name!r}{alike}")


PEERS = ("transformers-static", "transformers-continuous", "vllm", "sglang")
"""The other systems; a name begins with that of its distribution."""


def whole(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers that refuses those below ``least``."""

    def whole_number(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {number}")
        return number

    return whole_number


def _milliseconds(text: str) -> float:
    if not 0 <= (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return number


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers of at least 1, written as ``1,4``."""
    return tuple(map(whole(1), text.split(",")))


def add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    names = "directory, hub id, or tiny (gpt2)"
    add("--hf-model-id", "--model", default="gpt2", metavar="NAME", help=names)
    known = ", ".join(ARCHITECTURES)
    drawn = f"an architecture by name ({known}), with random weights; needs no network"
    add("--random-weights", action="store_true", help=drawn)
    add("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    add("--dtype", help="float32, float16 or bfloat16 (default: by checkpoint and device)")


def add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--prompt", default="Hello", metavar="TEXT", help="of every request (default: Hello)")
    add("--num-requests", type=whole(1), default=64, metavar="N", help="default: %(default)s")
    add("--max-new-tokens", type=whole(1), default=128, metavar="N", help="default: %(default)s")
    add("--no-stop-on-eos", action="store_true", help="go on after a token that ends a text")
    add("--pretok", action="store_true", help="tokenize the prompts before the clock starts")
    add("--do-sample", action="store_true", help="choose by chance, not the likeliest token")
    add("--temperature", type=float, help="with --do-sample (default there: 1)")
    add("--top-k", type=int, metavar="K", help="with --do-sample: among the K likeliest")
    add("--top-p", type=float, metavar="P", help="with --do-sample: of together probability P")


def add_streams(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("streams").add_argument
    repeats = "times that a request repeats the prompt; several numbers are taken in turns (1)"
    add("--prompt-repeats", type=_whole_numbers, default=(1,), metavar="N[,N...]", help=repeats)
    workers = "threads that tokenize prompts before they are due (0: when submitted)"
    add("--tokenize-workers", type=whole(0), default=0, metavar="N", help=workers)
    interval = "time between two requests (0: all at once)"
    add("--submit-interval-ms", type=_milliseconds, default=0.0, metavar="MS", help=interval)
    parts = "tokens handed over at a time, after the first (1)"
    add("--stream-interval", type=whole(1), default=1, metavar="N", help=parts)


def add_runs(parser: argparse.ArgumentParser, *, peers: bool = True) -> None:
    add = parser.add_argument_group("runs").add_argument
    add("--warmup-runs", type=whole(0), default=1, metavar="N", help="untimed, before (1)")
    add("--repeat-runs", type=whole(1), default=3, metavar="N", help="medians over these (3)")
    if peers:
        others = "run the same work on other systems too: all that are known, or those named"
        add("--peers", nargs="*", metavar="NAME", help=others)


def add_outputs(parser: argparse.ArgumentParser, *, plot: bool) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="write everything there as well")
    if plot:
        add("--plot", type=Path, metavar="FILE.png", help="draw a chart (needs matplotlib)")


def require_model(args: argparse.Namespace) -> None:
    """Refuse what ``add_model`` and ``add_runs`` were told, as far as it can be known by now."""
    if args.device is not None:
        require_device(args.device)
    if args.dtype is not None:
        require_dtype(args.dtype)
    if "peers" in args:
        peers_named(args.peers)
    if args.random_weights:
        require_architecture(args.hf_model_id)
    else:
        locate(args.hf_model_id)


def peers_named(names: Sequence[str] | None) -> tuple[str, ...]:
    """Check the names: None asks for no peer, and an empty list for all of them."""
    if names is None:
        return ()
    for name in names:
        if name not in PEERS:
            alike = did_you_mean(name, PEERS)
            raise ConfigError(f"--peers {name}: there are {', '.join(PEERS)}{alike}")
    return tuple(names or PEERS)


def say_importing() -> None:
    """Say what the seconds before the first figure are spent on."""
    say("importing torch and transformers")


def sampling(args: argparse.Namespace) -> SamplingParams:
    """Choose the likeliest token unless ``--do-sample`` says otherwise."""
    asked = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    chosen = {name: value for name, value in asked.items() if value is not None}
    if chosen and not args.do_sample:
        names = ", ".join("--" + name.replace("_", "-") for name in chosen)
        raise ConfigError(f"{names}: no effect on the likeliest token; add --do-sample")
    if args.do_sample and args.temperature == 0:
        raise ConfigError("--temperature 0 is the likeliest token: drop --do-sample, or raise it")
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        ignore_eos=args.no_stop_on_eos,
        **({"temperature": 1.0, **chosen} if args.do_sample else {}),
    )


# The shape of one layer's attention.


_SPREAD_BYTES = 1 << 30
"""Caches of that many bytes take turns, so that none is still in a GPU's L2 cache."""
_MOST_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one layer's attention, as ``bench attention`` is told it."""

    text: str
    sequences: int
    stored: int
    """Tokens of each sequence that are stored before, and attended to."""
    new: int
    """Tokens of each sequence that attend, to themselves and to all before them."""
    q_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """Read ``64x1024:32/8x128``, a step's, or ``8x0+2048:32/8x128``, one of prompts.

        These are sequences, context, query heads, KV heads and head size. A context with a plus is
        of stored tokens and new ones; without, the last of its tokens is new.
        """
        found = re.fullmatch(r"(\d+)x(?:(\d+)\+)?(\d+):(\d+)/(\d+)x(\d+)", text)
        sequences, stored, last, *heads = map(int, found.groups("-1")) if found else [0] * 6
        if min(sequences, last, *heads) < 1:
            raise argparse.ArgumentTypeError(
                f"{text} is no shape such as 64x1024:32/8x128 or 8x0+2048:32/8x128"
            )
        stored, new = (last - 1, 1) if stored < 0 else (stored, last)
        shape = cls(text, sequences, stored, new, *heads)
        if shape.q_heads % shape.kv_heads:
            raise argparse.ArgumentTypeError(
                f"{text}: {shape.kv_heads} KV heads are no part of {shape.q_heads} heads"
            )
        return shape

    @property
    def context(self) -> int:
        """The tokens of each sequence, the new ones included."""
        return self.stored + self.new

    def cache_bytes(self, dtype: torch.dtype) -> int:
        values = self.sequences * self.context * self.kv_heads * self.head_dim
        return 2 * values * dtype.itemsize

    def layers(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many layers' caches take turns."""
        count = -(-_SPREAD_BYTES // self.cache_bytes(dtype)) if device.type == "cuda" else 1
        return max(2, min(_MOST_LAYERS, count))


# The ways to drive an engine through requests: which arrives when.


def naive(run: Run) -> None:
    """Submit each request when the one before has ended."""
    while run.prompts:
        run.submit(time.perf_counter())
        run.drain()


def offline(run: Run) -> None:
    """Submit all requests at the beginning."""
    while run.prompts:
        run.submit(run.began)
    run.drain()


def online(run: Run) -> None:
    """Submit one request before every step."""
    while run.prompts:
        run.submit(time.perf_counter())
        run.step()
    run.drain()


def paced(interval_s: float) -> Callable[[Run], None]:
    """Return a way in which a request arrives every so often: when due, engine ready or not."""

    def drive(run: Run) -> None:
        while run.prompts:
            due = run.began + len(run.requests) * interval_s
            early = due - time.perf_counter()
            busy = run.engine.has_work
            if early <= 0 and (run.prompts[0].done() or not busy):
                run.submit(due)
            elif busy:
                run.step()
            else:
                time.sleep(early)
        run.drain()

    return drive


WAYS: dict[str, Callable[[Run], None]] = {"naive": naive, "online": online, "offline": offline}


# Requests of one length that decode side by side: their options, and an engine that holds them.


_OPTIONS = {
    "batch": (1, 64),
    "prompt-tokens": (1, 128),
    "max-new-tokens": (2, 256),
    "block-size": (1, 64),
}
"""Each option's least value and its default."""
_ASKED = (
    *("batch", "prompt_tokens", "max_new_tokens", "block_size"),
    *("warmup_runs", "repeat_runs"),
)
"""The options that a report repeats."""


def add_equal_requests(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("work")
    for name, (least, default) in _OPTIONS.items():
        group.add_argument(f"--{name}", type=whole(least), default=default, help="%(default)s")
    return group


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a report says of the work."""
    return {name: getattr(args, name) for name in _ASKED}


def engine_of_equal_requests(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``EngineConfig`` with which all are prefilled in one step."""
    blocks = -(-(args.prompt_tokens + args.max_new_tokens) // args.block_size) + 1
    return {
        "max_batch_size": args.batch,
        "block_size": args.block_size,
        "kv_cache_tokens": args.batch * blocks * args.block_size,
        "prefix_cache": False,
        "prefill_max_batch_size": args.batch,
        "prefill_max_tokens": args.batch * args.prompt_tokens,
    }
