"""Fetches projects to hold to the harness: ``python -m tests.others.fetch nano-vllm``.

They come into ``.others/`` and are imported from there; nothing is installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".others"


@dataclass(frozen=True, slots=True)
class Origin:
    repository: str | None = None
    """None where it comes as one of ``wheels``."""
    revision: str = ""
    wheels: tuple[str, ...] = ()
    """What it imports that this project has not; all come without their own dependencies."""


PROJECTS = {
    "nano-vllm": Origin(
        "https://github.com/GeeeekExplorer/nano-vllm",
        "bb823b3e06983d71485a8e1f23715ebd87d98ef8",
        ("xxhash",),
    ),
    "sglang": Origin(
        wheels=(
            "sglang==0.5.23",
            *("IPython", "traitlets", "apache-tvm-ffi==0.1.11", "certifi", "charset_normalizer"),
            *("compressed_tensors", "loguru", "dill", "gguf", "idna", "msgspec", "openai"),
            *("sniffio", "orjson", "partial_json_parser", "pillow", "psutil", "pybase64", "pyzmq"),
            *("requests", "sentencepiece", "starlette", "urllib3"),
        ),
    ),
}


def fetch(name: str, source: str | None = None) -> Path:
    """Bring a project from ``source``, or from where it is published, and return its folder."""
    project, folder = PROJECTS[name], FOLDER / name
    if project.repository:
        if not folder.exists():
            _run("git", "clone", "--quiet", source or project.repository, str(folder))
        _run("git", "-C", str(folder), "checkout", "--quiet", project.revision)
    if project.wheels:
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade")
        there = ("--find-links", source) if source and not project.repository else ()
        _run(*pip, *there, "--target", str(folder), *project.wheels)
    return folder


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument(
        "--source", metavar="FOLDER", help="a clone, or wheels, that are there already"
    )
    asked = parser.parse_args()
    print(fetch(asked.project, asked.source))
