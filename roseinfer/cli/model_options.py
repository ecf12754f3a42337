"""The options of every command that loads a model, and the load itself."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from roseinfer.config import (
    ADMISSION_POLICIES,
    SPECULATIONS,
    EngineConfig,
    Launched,
    require_device,
    require_dtype,
)
from roseinfer.distributed.processes import started_early
from roseinfer.errors import did_you_mean
from roseinfer.interrupts import interrupts_kill
from roseinfer.models.source import locate
from roseinfer.progress import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.llm import LLM


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    names = "a directory or a hub id (default: tiny, a small random model that writes nonsense)"
    add("--model", "--hf-model-id", default="tiny", metavar="NAME", help=names)
    add("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    dtypes = "float32, float16 or bfloat16 (default: the checkpoint's on a GPU, else float32)"
    add("--dtype", help=dtypes)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    add("--max-batch-size", type=int, metavar="N", help="prompts that are continued at once")
    add("--block-size", type=int, metavar="N", help="tokens of a block of the KV cache")
    tokens = "tokens the KV cache holds (default: what the device has room for)"
    add("--kv-cache-tokens", type=int, metavar="N", help=tokens)
    add("--max-length", type=int, metavar="N", help="most tokens of a prompt and its text")
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_const",
        const=False,
        help="compute prompts that begin alike each from its beginning",
    )
    order = "begin prompts in order, or prefer those that fit whole into a step"
    add("--prefill-admission-policy", choices=ADMISSION_POLICIES, help=order)
    ranks = "GPUs that compute the model together, each with a share of its heads (default: 1)"
    add("--tensor-parallel-size", type=int, metavar="N", help=ranks)
    seconds = "processor time in which a guide must be compiled where it is tried (default: 2)"
    add("--guide-cpu-seconds", type=float, metavar="SECONDS", help=seconds)
    memory = "megabytes that it may take for that (default: 512)"
    add("--guide-memory-mb", type=int, metavar="MB", help=memory)
    drafts = "guess tokens by what the text said before, and verify several in one step"
    add("--speculation", choices=SPECULATIONS, help=drafts)


def given_of(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return what the options say about the fields of a dataclass of settings."""
    values = {each.name: getattr(args, each.name, None) for each in fields(settings)}
    return {name: value for name, value in values.items() if value is not None}


def refuse_mistakes(args: argparse.Namespace) -> None:
    """Refuse what makes no sense before torch is loaded."""
    EngineConfig(**given_of(args, EngineConfig))
    if args.dtype is not None:
        require_dtype(args.dtype)
    if args.device is not None:
        require_device(args.device)
    locate(args.model)


def follow_if_launched(args: argparse.Namespace, command: str) -> None:
    """Do nothing but what the leading rank says, in a process that ``torchrun`` started beside it.

    This does not return there.
    """
    launched = Launched.from_env()
    if launched is not None and launched.rank and (args.tensor_parallel_size or 1) > 1:
        load_llm(args, command)


def load_llm(args: argparse.Namespace, command: str) -> LLM:
    """Load the model, and say so meanwhile in the name of a command."""
    with redirect_stdout(sys.stderr):  # what libraries print meanwhile is no output
        say(f"{command}: importing torch and transformers")
        ranks = 1 if Launched.from_env() else args.tensor_parallel_size or 1
        with started_early(ranks):
            with interrupts_kill():
                from roseinfer.llm import LLM
            say(f"{command}: loading {args.model}")
            config = given_of(args, EngineConfig)
            return LLM(args.model, device=args.device, dtype=args.dtype, **config)


class Parser(argparse.ArgumentParser):
    """The parser of every command: an option that it does not know is refused with what was
    close."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse what is left here already: who called a subcommand's parser knows none of it."""
        given = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(given, namespace)
        if unknown:
            named = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            known = [word[2:] for word in self._option_string_actions if word.startswith("--")]
            alike = did_you_mean(named[0].lstrip("-"), known, "--") if named else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{alike}")
        return found, unknown
