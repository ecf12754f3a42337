"""``roseinfer generate``: continue prompts and print the completions."""

from __future__ import annotations

import errno
import io
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.cli.model_options import (
    add_model_options,
    add_settings,
    follow_leader_if_launched,
    load_llm,
    parsed_fields,
    validate_options,
)
from roseinfer.config import EngineConfig
from roseinfer.errors import (
    BadArgument,
    ConfigError,
    RoseinferError,
    UnsupportedModel,
    did_you_mean,
)
from roseinfer.guided.guide import Guide
from roseinfer.sampling_params import SamplingParams
from roseinfer.terminal import discard_stdout, print_status

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from roseinfer.llm import LLM, Prompt, RequestOutput

HELP = "continue prompts with a language model"
DESCRIPTION = """\
Continue prompts with a language model. The completion of a single prompt is streamed; those of
several are printed once all have ended. Exit status 0: success; 1: some prompt failed; 2: wrong
usage, a model that cannot be loaded, or an output that cannot be written."""

_NAME = "roseinfer generate"
_SAMPLING_OPTIONS = ("top_k", "top_p", "min_p", "seed")
"""Options without an effect in greedy decoding. Giving one turns sampling on."""
_DEFAULTS = {
    "temperature": "0, but 1 with --top-k, --top-p, --min-p or --seed",
    "max_new_tokens": "128",
}
_LOGPROB_FIELDS = ("logprobs", "top_logprobs", "prompt_logprobs")
_FAILED, _USAGE_ERROR = 1, 2
_INTERRUPTED, _BROKEN_PIPE = 128 + 2, 128 + 13
"""Exit statuses of a shell for the signals SIGINT and SIGPIPE."""
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_TITLE_LENGTH = 60
_GUIDE = """--guide '{"regex": "[0-9]+"}'"""


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    add(
        "--prompts-file",
        metavar="FILE",
        help="file with a prompt in each line that is not blank; - is standard input. Without any "
        "prompt, all of standard input is one, without its last line end",
    )
    ids = "prompts and completions are space-separated token ids, for lack of a tokenizer"
    group.add_argument("--token-ids", action="store_true", help=ids)

    add_model_options(parser)

    add_settings(parser, SamplingParams, _DEFAULTS)
    add_settings(parser, EngineConfig)

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object a line for each prompt")


def run(args: argparse.Namespace) -> int:
    try:
        return _generate(args)
    except RoseinferError as error:
        _print_error(error)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # every print is flushed at once, so nothing is left in a buffer
        return _BROKEN_PIPE
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        discard_stdout()
        _print_error(f"the texts cannot be written: {error.strerror}")
        return _USAGE_ERROR


def _generate(args: argparse.Namespace) -> int:
    texts = _texts(args)
    prompts: list[Prompt] = [_ids(text) for text in texts] if args.token_ids else [*texts]
    params = _params(args)
    validate_options(args)
    follow_leader_if_launched(args, _NAME)
    llm = load_llm(args, _NAME)
    if llm.tokenizer is None and not args.token_ids:
        raise ConfigError(
            f"{args.model} has no tokenizer, so prompts cannot be text; give token ids, as in "
            "--token-ids --prompt '17 42 8'"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not show every character
    if len(prompts) == 1 and not args.json:
        return _stream(llm, prompts[0], params, as_ids=args.token_ids)
    outputs = llm.generate(prompts, params, progress=True)
    for number, each in enumerate(outputs, 1):
        _warn_if_truncated(each.finish_reason, len(each.token_ids), params, f"prompt {number}: ")
    if args.json:
        for output in map(asdict, outputs):
            for name in _LOGPROB_FIELDS:
                if not getattr(params, name):
                    del output[name]
            print(json.dumps(output), flush=True)
    else:
        _print_texts(outputs, as_ids=args.token_ids)
    errors = {number: output.error for number, output in enumerate(outputs, 1) if output.error}
    for number, error in errors.items():
        _print_error(f"prompt {number}: {error}")
    return _FAILED if errors else 0


def _warn_if_truncated(
    reason: str, generated: int, params: SamplingParams, whose: str = ""
) -> None:
    """Warn of a completion shorter than requested that the model did not end."""
    if reason == "length" and generated < params.max_new_tokens:
        _print_error(
            f"{whose}the text was cut after {generated} of {params.max_new_tokens} tokens: with "
            "its prompt it fills the model's positions, or --max-length"
        )


def _print_error(message: object) -> None:
    """Print an error in one line, even if the message of a library has several."""
    print_status(" ".join([f"{_NAME}:", *str(message).split()]))


def _texts(args: argparse.Namespace) -> list[str]:
    if args.prompt:
        return list(args.prompt)
    if args.prompts_file is not None:
        lines = _read(args.prompts_file).replace("\r\n", "\n").split("\n")
        texts = [line for line in lines if line.strip()]
        if not texts:
            raise ConfigError(f"--prompts-file {args.prompts_file} has no prompt: write one a line")
        return texts
    text = "" if sys.stdin is not None and sys.stdin.isatty() else _read("-")
    if not text.strip():
        raise ConfigError(
            "no prompt: give --prompt TEXT, --prompts-file FILE, or a text on standard input"
        )
    return [text.removesuffix("\n").removesuffix("\r")]


def _read(name: str) -> str:
    try:
        if name != "-":
            data = Path(name).read_bytes()
        else:  # None: it was closed
            data = b"" if sys.stdin is None else sys.stdin.buffer.read()
    except OSError as error:
        raise ConfigError(f"--prompts-file {name} cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")  # drops a byte order mark
    except UnicodeDecodeError:
        source = "standard input" if name == "-" else f"--prompts-file {name}"
        raise ConfigError(f"{source} is not UTF-8: prompts are texts") from None


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ConfigError(
            f"{text!r} is not a list of token ids; with --token-ids, give prompts such as "
            "--prompt '17 42 8'"
        ) from None


def _params(args: argparse.Namespace) -> SamplingParams:
    for name in _LOGPROB_FIELDS:
        if getattr(args, name) and not args.json:
            raise ConfigError(f"--{name.replace('_', '-')} needs --json; add it")
    values = {"max_new_tokens": 128} | parsed_fields(args, SamplingParams)
    if args.guide is not None:
        values["guide"] = _guide(args.guide)
    if values.keys() & set(_SAMPLING_OPTIONS):
        values.setdefault("temperature", 1.0)
    return SamplingParams(**values)


def _guide(text: str) -> Guide:
    """Return the guide of a JSON object whose only key is a field of ``Guide``."""
    problem = f"--guide {text!r:.80}: it must be a JSON object, as in {_GUIDE}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{problem}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(problem)
    kinds = [each.name for each in fields(Guide)]
    for unknown in value.keys() - set(kinds):
        hint = did_you_mean(unknown, kinds) or f"; use one of {', '.join(kinds)}"
        raise ConfigError(f"--guide {text!r:.80}: unknown kind of guide{hint}")
    try:
        return Guide(**value)
    except BadArgument as error:
        raise ConfigError(f"--guide {text!r:.80}: {error}") from None


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams, *, as_ids: bool) -> int:
    space = ""
    generated, reason = 0, ""
    try:
        for update in llm.stream(prompt, params):
            generated += update.token_id is not None
            reason = update.finish_reason or ""
            if not as_ids:
                print(update.text, end="", flush=True)
            elif update.token_id is not None:
                print(f"{space}{update.token_id}", end="", flush=True)
                space = " "
    except UnsupportedModel:
        raise  # not an error of the prompt
    except RoseinferError as error:
        if generated:
            print(flush=True)
        _print_error(error)
        return _FAILED
    print(flush=True)
    _warn_if_truncated(reason, generated, params)
    return 0


def _print_texts(outputs: Sequence[RequestOutput], *, as_ids: bool) -> None:
    sections = []
    for number, output in enumerate(outputs, 1):
        text = _join_ids(output.token_ids) if as_ids else output.text or ""
        sections.append(f"==> {number}: {_title(output.prompt)} <==\n{text}")
    print("\n\n".join(sections), flush=True)


def _title(prompt: Prompt) -> str:
    summary = " ".join(prompt.split()) if isinstance(prompt, str) else _join_ids(prompt)
    return summary if len(summary) <= _TITLE_LENGTH else summary[: _TITLE_LENGTH - 3] + "..."


def _join_ids(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))
