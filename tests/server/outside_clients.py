"""Clients that others wrote to find fault with servers: ``python -m tests.server.outside_clients``.

They come with the extra ``clients``. schemathesis makes bodies, right and wrong, of the schema the
server says it has; llm-comply asks what OpenAI's and the Open Responses' specifications promise.
guidellm is a load client. What it needs does not go with what is tested here, so it is given by the
path of its program, in an environment of its own.
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
"""What llm-comply asks for and is served: images are refused, and tools of responses. Its function
of chats takes a text, which a random model does not end."""
_ENDS = [256, *range(0, 256, 12)]
"""Tokens that end a text here. The tiny model alone would hardly ever end one."""


def of_the_environment(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def save_model(folder: str) -> None:
    """Save the tiny model as one whose texts are short, and end by themselves."""
    tiny = tiny_gpt2()
    tiny.model.generation_config.eos_token_id = _ENDS
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)


def schemathesis(server: Serving, examples: int) -> int:
    return subprocess.run(
        [
            of_the_environment("schemathesis"),
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
    asked = ",".join(f"{prefix}{name}" for name in tests.split())
    return subprocess.run(
        [
            of_the_environment("llm-comply"),
            *("-u", f"{server.url}/v1", "-k", "none", "-m", "tiny"),
            *("--format", form, "-f", asked),
        ],
        check=False,
    ).returncode


def guidellm(server: Serving, program: str, folder: str, seconds: int) -> int:
    """Have 16 clients ask for texts of 64 tokens, and look that none ended with an error."""
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
    parser.add_argument("--guidellm", metavar="PROGRAM", help="have this make load too")
    parser.add_argument("--seconds", type=int, default=60, help="how long it does")
    asked = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        save_model(folder)
        options = ("--model", folder, "--served-model-name", "tiny", "--no-access-log")
        server = stack.enter_context(serving(*options))
        failed = {
            "llm-comply, chat": comply(server, "openai-chat", CHAT, "chat-"),
            "llm-comply, responses": comply(server, "open-responses", RESPONSES),
            "schemathesis": schemathesis(server, asked.examples),
        }
        if asked.guidellm:
            program = str(Path(asked.guidellm).absolute())
            failed["guidellm"] = guidellm(server, program, folder, asked.seconds)
    print({name: "failed" if status else "passed" for name, status in failed.items()})
    return int(any(failed.values()))


if __name__ == "__main__":
    raise SystemExit(main())
