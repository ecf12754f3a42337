"""Options of every command that loads a model, and loading it."""

from __future__ import annotations

import argparse
import sys
import threading
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from roseinfer.config import EngineConfig, TorchrunRank, require_device, require_dtype
from roseinfer.distributed.processes import prestarted_ranks
from roseinfer.errors import did_you_mean
from roseinfer.imports import quick_imports
from roseinfer.models.locate_model import locate
from roseinfer.terminal import interrupts_kill, print_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import Field

    from roseinfer.llm import LLM


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    names = (
        "directory, GGUF file or hub id (default: tiny, a small random model that writes nonsense)"
    )
    add("--model", "--hf-model-id", default="tiny", metavar="NAME", help=names)
    add("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    dtypes = "float32, float16 or bfloat16 (default: the checkpoint's on a GPU, else float32)"
    add("--dtype", help=dtypes)


def add_settings(
    parser: argparse.ArgumentParser, settings: type, defaults: Mapping[str, str] | None = None
) -> None:
    """Add an option for each field of a dataclass that ``setting`` declares; unset ones are None.

    Each goes into the group that its declaration names. ``defaults`` are help texts of the
    command's own defaults, by setting.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for each in fields(settings):
        if not each.metadata:
            continue
        name = each.metadata["group"]
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        names = option_names(each)
        text = help_of(each, (defaults or {}).get(each.name, ""))
        group.add_argument(*names, dest=each.name, default=None, help=text, **_kind(each))


def option_names(declared: Field[Any]) -> list[str]:
    """Return the option names of a setting."""
    return [f"--{declared.name.replace('_', '-')}", *declared.metadata["also"]]


def help_of(declared: Field[Any], default: str = "") -> str:
    """Return the help text of a setting, which ends with its default."""
    default = default or str(declared.metadata["unset"])
    if not default and declared.default not in ((), None):
        default = str(declared.default)
        if isinstance(declared.default, bool):
            default = "on" if declared.default else "off"
    text = str(declared.metadata["text"]) + f" (default: {default})" * bool(default)
    return text.replace("%", "%%")


def _kind(declared: Field[Any]) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` that parse a setting's value."""
    kind, unit = str(declared.type).removesuffix(" | None"), declared.metadata.get("unit")
    if kind == "bool":
        return {"action": argparse.BooleanOptionalAction}
    if choices := declared.metadata.get("choices"):
        return {"choices": choices}
    if kind in ("int", "float"):
        return {"type": {"int": int, "float": float}[kind], "metavar": unit or "N"}
    if kind == "tuple[str, ...]":
        listed: dict[str, Any] = {
            "commas": {"type": _names},
            "words": {"nargs": "+"},
            "repeated": {"action": "append"},
        }
        return {**listed[declared.metadata["listed"]], "metavar": unit}
    return {"metavar": unit or "NAME"}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def parsed_fields(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return the fields of a dataclass of settings that were given as options."""
    values = {each.name: getattr(args, each.name, None) for each in fields(settings)}
    return {name: value for name, value in values.items() if value is not None}


def validate_options(args: argparse.Namespace) -> None:
    """Raise for invalid options, before torch is imported."""
    EngineConfig(**parsed_fields(args, EngineConfig))
    if args.dtype is not None:
        require_dtype(args.dtype)
    if args.device is not None:
        require_device(args.device)
    locate(args.model)


def follow_leader_if_launched(args: argparse.Namespace, command: str) -> None:
    """Run as a follower in every process of ``torchrun`` but the first; do not return there."""
    launched = TorchrunRank.from_env()
    if launched is not None and launched.rank and (args.tensor_parallel_size or 1) > 1:
        load_llm(args, command)


def load_llm(args: argparse.Namespace, command: str) -> LLM:
    """Load the model, and print status lines in the name of a command."""
    with redirect_stdout(sys.stderr):  # keeps prints of libraries out of the output
        print_status(f"{command}: importing torch and transformers")
        launched = TorchrunRank.from_env() is not None
        with prestarted_ranks(1 if launched else args.tensor_parallel_size or 1):
            with interrupts_kill(), quick_imports():
                if not launched:
                    _begin_gpu_context(args.device)
                from roseinfer.llm import LLM
            print_status(f"{command}: loading {args.model}")
            config = parsed_fields(args, EngineConfig)
            return LLM(args.model, device=args.device, dtype=args.dtype, **config)


def _begin_gpu_context(device: str | None) -> None:
    """Create the GPU's context in a thread while the caller imports libraries.

    An error there is raised again, in words for the user, when the model is loaded.
    """
    import torch

    def begin() -> None:
        with suppress(RuntimeError):
            if torch.cuda.is_available():
                torch.empty(1, device=device or "cuda")

    threading.Thread(target=begin, name="roseinfer GPU context", daemon=True).start()


class Parser(argparse.ArgumentParser):
    """The parser of every command, which suggests a similar option for an unknown one."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here, since only a subcommand's own parser knows its options."""
        arguments = sys.argv[1:] if args is None else list(args)
        parsed, unknown = super().parse_known_args(arguments, namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            option_names = [
                word[2:] for word in self._option_string_actions if word.startswith("--")
            ]
            suggestion = did_you_mean(options[0].lstrip("-"), option_names, "--") if options else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion}")
        return parsed, unknown
