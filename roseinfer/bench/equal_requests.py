"""Requests of one length that decode side by side: their options, and an engine that holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer.bench.arguments import whole

if TYPE_CHECKING:
    import argparse

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
