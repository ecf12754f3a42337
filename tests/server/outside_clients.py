"""Conformance tools of others run on the server: ``python -m tests.server.outside_clients``.

They are the dependency group ``clients``. schemathesis generates valid and invalid bodies from the
server's schema; llm-comply checks OpenAI's and the Open Responses' specifications. guidellm is a
load client. Its dependencies conflict with those of these tests, so it is given by the path of its
program, in an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.request import urlopen

from roseinfer import tiny_gpt2
from tests.server.serve_process import serving

if TYPE_CHECKING:
    from tests.server.serve_process import Serving

CHAT = "basic-response system-prompt multi-turn streaming-response streaming-usage error-handling"
RESPONSES = f"{CHAT} assistant-phase response-output-phase-schema"
"""Checks of llm-comply that the server supports: it has no images, and no tools of responses. The
function check of chats needs a completion that a random model does not end.
"""
_EOS_TOKENS = [256, *range(0, 256, 12)]
"""Tokens that end a completion here. The tiny model alone would hardly ever end one."""


def program_path(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def save_model(folder: str) -> None:
    """Save the tiny model with EOS tokens that make completions short."""
    tiny = tiny_gpt2()
    tiny.model.generation_config.eos_token_id = _EOS_TOKENS
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)


def schemathesis(server: Serving, examples: int) -> int:
    return subprocess.run(
        [
            program_path("schemathesis"),
            "run",
            f"{server.url}/openapi.json",
            f"--max-examples={examples}",
            "--request-timeout=120",
            "--no-color",
        ],
        env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.server.schema_hooks"},
        check=False,
    ).returncode


def comply(server: Serving, form: str, tests: str, prefix: str = "") -> int:
    checks = ",".join(f"{prefix}{name}" for name in tests.split())
    return subprocess.run(
        [
            program_path("llm-comply"),
            *("-u", f"{server.url}/v1", "-k", "none", "-m", "tiny"),
            *("--format", form, "-f", checks),
        ],
        check=False,
    ).returncode


def guidellm(server: Serving, program: str, folder: str, seconds: int) -> int:
    """Have 16 clients request 64 tokens each, and check that none ended with an error."""
    status = subprocess.run(
        [
            *(program, "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={server.url},model=tiny"),
            *("--profile", "kind=concurrent,streams=16"),
            *("--constraint", f"kind=max_duration,seconds={seconds}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=64"),
            *("--tokenizer", f"kind=huggingface_auto,model={folder}"),
            *("--output", "kind=console"),
        ],
        env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
        cwd=folder,
        check=False,
    ).returncode
    with urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    ends = dict(re.findall(r'finished_reason="(\w+)".*? ([\d.]+)\n', text))
    print(ends)
    return status or int(float(ends["error"]) > 0 or float(ends["length"]) < seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--guidellm", metavar="PROGRAM", help="also run this load client")
    parser.add_argument("--seconds", type=int, default=60, help="duration of that load")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        save_model(folder)
        options = ("--model", folder, "--served-model-name", "tiny", "--no-access-log")
        server = stack.enter_context(serving(*options))
        failed = {
            "llm-comply, chat": comply(server, "openai-chat", CHAT, "chat-"),
            "llm-comply, responses": comply(server, "open-responses", RESPONSES),
            "schemathesis": schemathesis(server, arguments.examples),
        }
        if arguments.guidellm:
            program = str(Path(arguments.guidellm).absolute())
            failed["guidellm"] = guidellm(server, program, folder, arguments.seconds)
    print({name: "failed" if status else "passed" for name, status in failed.items()})
    return int(any(failed.values()))


if __name__ == "__main__":
    raise SystemExit(main())
