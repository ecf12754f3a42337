"""``roseinfer generate``: continue prompts and print what comes."""

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
    follow_if_launched,
    given_of,
    load_llm,
    refuse_mistakes,
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
from roseinfer.progress import let_go_of_the_result, say
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from roseinfer.llm import LLM, Prompt, RequestOutput

HELP = "continue prompts with a language model"
DESCRIPTION = """\
Continue prompts with a language model. The text of one prompt is printed as it comes, the
texts of several once all have ended. Exit status 0 when all went well, 1 when some prompt
could not be continued, 2 when nothing could be done: wrong usage, or a model that cannot be
loaded."""

_NAME = "roseinfer generate"
_CHOOSING = ("top_k", "top_p", "min_p", "seed")
"""These options have no effect where the most likely token is taken."""
_DEFAULTS = {
    "temperature": "0, but 1 with --top-k, --top-p, --min-p or --seed",
    "max_new_tokens": "128",
}
_TOLD = ("logprobs", "top_logprobs", "prompt_logprobs")
_FAILED, _NOTHING_DONE = 1, 2
_INTERRUPTED, _NOBODY_READS = 128 + 2, 128 + 13
"""These are the statuses by which a shell reports the signals SIGINT and SIGPIPE."""
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
        help="a prompt in each line that is not blank; - is standard input. Without any "
        "prompt, all of standard input is one, less the line end it closes with",
    )
    ids = "prompts and texts are token ids with spaces between (for lack of a tokenizer)"
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
        _complain(error)
        return _NOTHING_DONE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # all that is printed is flushed at once, so nothing is left
        return _NOBODY_READS
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        let_go_of_the_result()
        _complain(f"the texts cannot be written: {error.strerror}")
        return _NOTHING_DONE


def _generate(args: argparse.Namespace) -> int:
    texts = _texts(args)
    prompts: list[Prompt] = [_ids(text) for text in texts] if args.token_ids else [*texts]
    params = _params(args)
    refuse_mistakes(args)
    follow_if_launched(args, _NAME)
    llm = load_llm(args, _NAME)
    if llm.tokenizer is None and not args.token_ids:
        raise ConfigError(
            f"{args.model} has no tokenizer, so it reads no text: give token ids, as in "
            "--token-ids --prompt '17 42 8'"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not show every character
    if len(prompts) == 1 and not args.json:
        return _stream(llm, prompts[0], params, as_ids=args.token_ids)
    outputs = llm.generate(prompts, params, progress=True)
    for number, each in enumerate(outputs, 1):
        _say_if_cut(each.finish_reason, len(each.token_ids), params, f"prompt {number}: ")
    if args.json:
        for output in map(asdict, outputs):
            for name in _TOLD:
                if not getattr(params, name):
                    del output[name]
            print(json.dumps(output), flush=True)
    else:
        _print_texts(outputs, as_ids=args.token_ids)
    errors = {number: output.error for number, output in enumerate(outputs, 1) if output.error}
    for number, error in errors.items():
        _complain(f"prompt {number}: {error}")
    return _FAILED if errors else 0


def _say_if_cut(reason: str, generated: int, params: SamplingParams, whose: str = "") -> None:
    """Say that a text is shorter than was asked for, though the model did not end it."""
    if reason == "length" and generated < params.max_new_tokens:
        _complain(
            f"{whose}the text was cut after {generated} of {params.max_new_tokens} tokens: it has "
            "as many with its prompt as the model has positions, or as --max-length allows"
        )


def _complain(what: object) -> None:
    """Print an error in one line, even where a library's message has several."""
    say(" ".join([f"{_NAME}:", *str(what).split()]))


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
        return data.decode("utf-8-sig")  # a byte order mark is no part of a prompt
    except UnicodeDecodeError:
        source = "standard input" if name == "-" else f"--prompts-file {name}"
        raise ConfigError(f"{source} is not UTF-8: prompts are texts") from None


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ConfigError(
            f"{text!r} is no list of token ids: with --token-ids a prompt is written as in "
            "--prompt '17 42 8'"
        ) from None


def _params(args: argparse.Namespace) -> SamplingParams:
    for name in _TOLD:
        if getattr(args, name) and not args.json:
            raise ConfigError(f"--{name.replace('_', '-')} are printed with --json alone: add it")
    given = {"max_new_tokens": 128} | given_of(args, SamplingParams)
    if args.guide is not None:
        given["guide"] = _guide(args.guide)
    if given.keys() & set(_CHOOSING):
        given.setdefault("temperature", 1.0)
    return SamplingParams(**given)


def _guide(text: str) -> Guide:
    """Read a guide whose only field is named in a JSON object."""
    wanted = f"--guide {text!r:.80}: it must be a JSON object, as in {_GUIDE}"
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{wanted}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(wanted)
    forms = [each.name for each in fields(Guide)]
    for unknown in found.keys() - set(forms):
        known = did_you_mean(unknown, forms) or f": it is one of {', '.join(forms)}"
        raise ConfigError(f"--guide {text!r:.80} asks for no form that there is{known}")
    try:
        return Guide(**found)
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
        raise  # no fault of the prompt
    except RoseinferError as error:
        if generated:
            print(flush=True)
        _complain(error)
        return _FAILED
    print(flush=True)
    _say_if_cut(reason, generated, params)
    return 0


def _print_texts(outputs: Sequence[RequestOutput], *, as_ids: bool) -> None:
    sections = []
    for number, output in enumerate(outputs, 1):
        text = _spaced(output.token_ids) if as_ids else output.text or ""
        sections.append(f"==> {number}: {_title(output.prompt)} <==\n{text}")
    print("\n\n".join(sections), flush=True)


def _title(prompt: Prompt) -> str:
    words = " ".join(prompt.split()) if isinstance(prompt, str) else _spaced(prompt)
    return words if len(words) <= _TITLE_LENGTH else words[: _TITLE_LENGTH - 3] + "..."


def _spaced(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))
