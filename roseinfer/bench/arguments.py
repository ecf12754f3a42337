"""The command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roseinfer.bench.architectures import ARCHITECTURES, require_architecture
from roseinfer.config import ADMISSION_POLICIES, EngineConfig, require_device, require_dtype
from roseinfer.errors import ConfigError, did_you_mean
from roseinfer.how_far import say
from roseinfer.models.source import locate
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def add_engine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add options under the names of ``EngineConfig``; each is None by default."""
    group = parser.add_argument_group("engine, as EngineConfig has it where nothing is said")
    add = group.add_argument
    switch = argparse.BooleanOptionalAction
    add("--max-batch-size", type=whole(1), metavar="N", help="requests that run at once")
    add("--block-size", type=whole(1), metavar="N", help="tokens of a block of the KV cache")
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_const",
        const=False,
        help="compute every prompt from its beginning",
    )
    kernels = "attend with the Triton kernels, or with the reference"
    add("--paged-attn", dest="paged_attention", action=switch, help=kernels)
    fused = "run a model on fused kernels where there are some for it, or on its own modules"
    add("--fused-model", action=switch, help=fused)
    layers = "torch.compile the layers of a model on its own modules"
    bits = "the same bits for a request in any batch, or the faster products of each size"
    add("--batch-invariant", action=switch, help=bits)
    add("--compile-layers", action="store_const", const=True, help=layers)
    add("--cuda-graph", action=switch, help="replay a step as one CUDA graph, or launch it")
    add("--run-ahead", type=whole(0), metavar="N", help="steps the device may be ahead")
    return group


def add_prefill(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--prefill-max-batch-size", type=whole(1), metavar="N", help="prompts in one step")
    add("--prefill-max-tokens", type=whole(1), metavar="N", help="prompt tokens of one step")
    rows = "prompts of a step with up to so many tokens run as rows that decode"
    add("--prompt-rows", type=whole(0), metavar="N", help=rows)
    order = "begin prompts in order, or prefer those that fit whole into a step"
    add("--prefill-admission-policy", choices=ADMISSION_POLICIES, help=order)


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


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``EngineConfig`` that an option sets."""
    given = {field.name: getattr(args, field.name, None) for field in fields(EngineConfig)}
    return {name: value for name, value in given.items() if value is not None}


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
