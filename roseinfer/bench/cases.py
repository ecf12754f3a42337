"""Command-line options, model architectures, shapes and arrival modes of the benchmarks."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from roseinfer.config import require_device, require_dtype
from roseinfer.errors import ConfigError, did_you_mean
from roseinfer.models.locate_model import locate
from roseinfer.sampling_params import SamplingParams
from roseinfer.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from roseinfer.bench.driver import Run

# Architectures of ``--random-weights``, by name; this part does not import torch.


class _Architecture(NamedTuple):
    """Configuration of a transformers model."""

    config: str
    """Name of its configuration class in transformers."""
    sizes: dict[str, Any]
    """Arguments of the class that differ from its defaults."""


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
    # Mixture of experts: each token is routed to 8 of 64.
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
    # A family without fused kernels.
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
    """Return a model's configuration, with the byte-level tokenizer's end token as EOS."""
    require_architecture(name)
    import transformers

    from roseinfer.models.tiny import END

    kind, sizes = ARCHITECTURES[name]
    return getattr(transformers, kind)(**sizes, bos_token_id=END, eos_token_id=END)


def require_architecture(name: str) -> None:
    if name not in ARCHITECTURES:
        names, suggestion = ", ".join(ARCHITECTURES), did_you_mean(name, ARCHITECTURES)
        raise ConfigError(
            f"--random-weights: unknown architecture {name!r}; use one of {names}{suggestion}"
        )


PEERS = ("transformers-static", "transformers-continuous", "vllm", "sglang")
"""Names of the other systems, which begin with the name of their distribution on PyPI."""


def int_at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that refuses those below ``minimum``."""

    def whole_number(text: str) -> int:
        if (number := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {number}")
        return number

    return whole_number


def _milliseconds(text: str) -> float:
    if not 0 <= (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return number


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Parse whole numbers of at least 1, such as ``1,4``."""
    return tuple(map(int_at_least(1), text.split(",")))


def add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    names = "directory, hub id, or tiny (gpt2)"
    add("--hf-model-id", "--model", default="gpt2", metavar="NAME", help=names)
    architectures = ", ".join(ARCHITECTURES)
    random_weights = (
        f"an architecture by name ({architectures}), with random weights; needs no network"
    )
    add("--random-weights", action="store_true", help=random_weights)
    add("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    add("--dtype", help="float32, float16 or bfloat16 (default: by checkpoint and device)")


def add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--prompt", default="Hello", metavar="TEXT", help="text of every request (default: Hello)")
    add(
        "--num-requests", type=int_at_least(1), default=64, metavar="N", help="default: %(default)s"
    )
    add(
        "--max-new-tokens",
        type=int_at_least(1),
        default=128,
        metavar="N",
        help="default: %(default)s",
    )
    add("--no-stop-on-eos", action="store_true", help="do not stop at EOS")
    add("--pretok", action="store_true", help="tokenize the prompts before the clock starts")
    add("--do-sample", action="store_true", help="sample tokens (default: greedy)")
    add("--temperature", type=float, help="with --do-sample (default with it: 1)")
    add("--top-k", type=int, metavar="K", help="with --do-sample: top-k sampling")
    add("--top-p", type=float, metavar="P", help="with --do-sample: top-p (nucleus) sampling")


def add_streams(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("streams").add_argument
    repeats = "copies of the prompt text in a request; several numbers alternate (1)"
    add("--prompt-repeats", type=_whole_numbers, default=(1,), metavar="N[,N...]", help=repeats)
    workers = "threads that tokenize prompts in advance (0: at submission)"
    add("--tokenize-workers", type=int_at_least(0), default=0, metavar="N", help=workers)
    interval = "time between two requests (0: all at once)"
    add("--submit-interval-ms", type=_milliseconds, default=0.0, metavar="MS", help=interval)
    parts = "tokens delivered at a time, after the first (1)"
    add("--stream-interval", type=int_at_least(1), default=1, metavar="N", help=parts)


def add_runs(parser: argparse.ArgumentParser, *, peers: bool = True) -> None:
    add = parser.add_argument_group("runs").add_argument
    add(
        "--warmup-runs",
        type=int_at_least(0),
        default=1,
        metavar="N",
        help="untimed runs before (1)",
    )
    add(
        "--repeat-runs",
        type=int_at_least(1),
        default=3,
        metavar="N",
        help="timed runs, for medians (3)",
    )
    if peers:
        peers_help = "run the same work on other systems too: those named, or all without a name"
        add("--peers", nargs="*", metavar="NAME", help=peers_help)


def add_outputs(parser: argparse.ArgumentParser, *, plot: bool) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="write all tables to a file as well")
    if plot:
        add("--plot", type=Path, metavar="FILE.png", help="draw a chart (needs matplotlib)")


def require_model(args: argparse.Namespace) -> None:
    """Check the options of ``add_model`` and ``add_runs``, as far as possible without torch."""
    if args.device is not None:
        require_device(args.device)
    if args.dtype is not None:
        require_dtype(args.dtype)
    if "peers" in args:
        validate_peers(args.peers)
    if args.random_weights:
        require_architecture(args.hf_model_id)
    else:
        locate(args.hf_model_id)


def validate_peers(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the peers by their names: none for None, and all for an empty list."""
    if names is None:
        return ()
    for name in names:
        if name not in PEERS:
            suggestion = did_you_mean(name, PEERS)
            raise ConfigError(f"--peers {name}: unknown; use {', '.join(PEERS)}{suggestion}")
    return tuple(names or PEERS)


def announce_import() -> None:
    """Print the reason for the wait of some seconds before the first figure."""
    print_status("importing torch and transformers")


def sampling(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters of the options: greedy without ``--do-sample``."""
    options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    given_options = {name: value for name, value in options.items() if value is not None}
    if given_options and not args.do_sample:
        names = ", ".join("--" + name.replace("_", "-") for name in given_options)
        raise ConfigError(f"{names}: no effect on greedy decoding; add --do-sample")
    if args.do_sample and args.temperature == 0:
        raise ConfigError("--temperature 0: this is greedy; drop --do-sample, or raise it")
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        ignore_eos=args.no_stop_on_eos,
        **({"temperature": 1.0, **given_options} if args.do_sample else {}),
    )


# Shapes of attention.


_SPREAD_BYTES = 1 << 30
"""Bytes of the alternating layers' caches together, so that none is still in a GPU's L2 cache."""
_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of one layer's attention, an argument of ``bench attention``."""

    text: str
    sequences: int
    stored: int
    """Stored tokens per sequence, before the new ones."""
    new: int
    """New tokens per sequence, which attend to themselves and all tokens before them."""
    q_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """Parse ``64x1024:32/8x128``, of a decode step, or ``8x0+2048:32/8x128``, of a prefill.

        The numbers are sequences, context, query heads, KV heads and head size. A context with a
        plus is stored and new tokens; without, its last token is new.
        """
        match = re.fullmatch(r"(\d+)x(?:(\d+)\+)?(\d+):(\d+)/(\d+)x(\d+)", text)
        sequences, stored, last, *heads = map(int, match.groups("-1")) if match else [0] * 6
        if min(sequences, last, *heads) < 1:
            raise argparse.ArgumentTypeError(
                f"{text}: invalid shape; use one such as 64x1024:32/8x128 or 8x0+2048:32/8x128"
            )
        stored, new = (last - 1, 1) if stored < 0 else (stored, last)
        shape = cls(text, sequences, stored, new, *heads)
        if shape.q_heads % shape.kv_heads:
            raise argparse.ArgumentTypeError(
                f"{text}: {shape.q_heads} query heads are no multiple of {shape.kv_heads} KV heads"
            )
        return shape

    @property
    def context(self) -> int:
        """Tokens per sequence, including the new ones."""
        return self.stored + self.new

    def cache_bytes(self, dtype: torch.dtype) -> int:
        values = self.sequences * self.context * self.kv_heads * self.head_dim
        return 2 * values * dtype.itemsize

    def layers(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return the number of layers whose caches alternate."""
        count = -(-_SPREAD_BYTES // self.cache_bytes(dtype)) if device.type == "cuda" else 1
        return max(2, min(_MAX_LAYERS, count))


# Arrival modes of requests.


def naive(run: Run) -> None:
    """Submit each request when the previous one has ended."""
    while run.prompts:
        run.submit(time.perf_counter())
        run.drain()


def offline(run: Run) -> None:
    """Submit all requests at the beginning."""
    while run.prompts:
        run.submit(run.started_at)
    run.drain()


def online(run: Run) -> None:
    """Submit one request before every step."""
    while run.prompts:
        run.submit(time.perf_counter())
        run.step()
    run.drain()


def paced(interval_s: float) -> Callable[[Run], None]:
    """Return an arrival mode with a request every ``interval_s``, even if the engine is busy."""

    def drive(run: Run) -> None:
        while run.prompts:
            arrival = run.started_at + len(run.requests) * interval_s
            wait_s = arrival - time.perf_counter()
            busy = run.engine.has_work
            if wait_s <= 0 and (run.prompts[0].done() or not busy):
                run.submit(arrival)
            elif busy:
                run.step()
            else:
                time.sleep(wait_s)
        run.drain()

    return drive


ARRIVAL_MODES: dict[str, Callable[[Run], None]] = {
    "naive": naive,
    "online": online,
    "offline": offline,
}


# Requests of equal length that decode together: their options, and the engine's settings.


_OPTIONS = {
    "batch": (1, 64),
    "prompt-tokens": (1, 128),
    "max-new-tokens": (2, 256),
    "block-size": (1, 64),
}
"""Least value and default of each option."""
_CONFIG_OPTIONS = (
    *("batch", "prompt_tokens", "max_new_tokens", "block_size"),
    *("warmup_runs", "repeat_runs"),
)
"""Options that are in a report's configuration."""


def add_equal_requests(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("work")
    for name, (min_tokens, default) in _OPTIONS.items():
        group.add_argument(
            f"--{name}", type=int_at_least(min_tokens), default=default, help="%(default)s"
        )
    return group


def workload_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the work for a report's configuration."""
    return {name: getattr(args, name) for name in _CONFIG_OPTIONS}


def equal_requests_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return fields of ``EngineConfig`` that let one step prefill all requests."""
    blocks = -(-(args.prompt_tokens + args.max_new_tokens) // args.block_size) + 1
    return {
        "max_batch_size": args.batch,
        "block_size": args.block_size,
        "kv_cache_tokens": args.batch * blocks * args.block_size,
        "prefix_cache": False,
        "prefill_max_batch_size": args.batch,
        "prefill_max_tokens": args.batch * args.prompt_tokens,
    }
