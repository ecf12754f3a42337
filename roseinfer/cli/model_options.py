"""The options of every command that loads a model, and the load itself."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from roseinfer.config import EngineConfig, Launched, require_device, require_dtype
from roseinfer.distributed.processes import started_early
from roseinfer.errors import did_you_mean
from roseinfer.interrupts import interrupts_kill
from roseinfer.models.source import locate
from roseinfer.progress import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from dataclasses import Field

    from roseinfer.llm import LLM


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    names = "a directory or a hub id (default: tiny, a small random model that writes nonsense)"
    add("--model", "--hf-model-id", default="tiny", metavar="NAME", help=names)
    add("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    dtypes = "float32, float16 or bfloat16 (default: the checkpoint's on a GPU, else float32)"
    add("--dtype", help=dtypes)


def add_settings(
    parser: argparse.ArgumentParser, settings: type, defaults: Mapping[str, str] | None = None
) -> None:
    """Add an option for each field of a dataclass that ``setting`` declares; each is None if unset.

    Each goes into the group that its declaration names. ``defaults`` are texts for settings that a
    command has its own defaults for.
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
    """Return the names of the option of a setting."""
    return [f"--{declared.name.replace('_', '-')}", *declared.metadata["also"]]


def help_of(declared: Field[Any], default: str = "") -> str:
    """Return the help of a setting, which ends with what happens where it is not given."""
    default = default or str(declared.metadata["unset"])
    if not default and declared.default not in ((), None):
        default = str(declared.default)
        if isinstance(declared.default, bool):
            default = "on" if declared.default else "off"
    text = str(declared.metadata["text"]) + f" (default: {default})" * bool(default)
    return text.replace("%", "%%")


def _kind(declared: Field[Any]) -> dict[str, Any]:
    """Return how an option reads its value."""
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
