"""Fetches projects to hold to the harness: ``python -m tests.others.fetch nano-vllm``.

They come into ``.others/`` and are imported from there; nothing is installed. One that was there is
replaced, as by another ``--release``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

FOLDER = Path(__file__).parents[2] / ".others"


@dataclass(frozen=True, slots=True)
class Origin:
    repository: str | None = None
    """None where it comes as one of ``wheels``."""
    revision: str = ""
    """A commit; or the release of a wheel, which has the project's name."""
    wheels: tuple[str, ...] = ()
    """What it imports that this project has not; all come without their own dependencies."""
    python_only: bool = False
    """Unpack the Python files and the metadata of its own wheel alone: its kernels are large."""


PROJECTS = {
    "nano-vllm": Origin(
        "https://github.com/GeeeekExplorer/nano-vllm",
        "bb823b3e06983d71485a8e1f23715ebd87d98ef8",
        wheels=("xxhash",),
    ),
    "sglang": Origin(
        revision="0.5.23",
        wheels=(
            *("IPython", "traitlets", "apache-tvm-ffi==0.1.11", "certifi", "charset_normalizer"),
            *("compressed_tensors", "loguru", "dill", "gguf", "idna", "msgspec", "openai"),
            *("sniffio", "orjson", "partial_json_parser", "pillow", "psutil", "pybase64", "pyzmq"),
            *("requests", "sentencepiece", "starlette", "urllib3"),
        ),
    ),
    "vllm": Origin(
        revision="0.33.0",
        python_only=True,
        wheels=(
            *("aiohappyeyeballs", "aiohttp", "aiosignal", "apache-tvm-ffi", "attrs", "cachetools"),
            *("cbor2", "certifi", "charset_normalizer", "cloudpickle", "fastapi", "frozenlist"),
            *("llguidance", "msgspec", "multidict", "openai", "openai_harmony", "psutil"),
            *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions"),
            *("partial_json_parser", "prometheus_client", "propcache", "pybase64", "pyzmq"),
            *("requests", "sniffio", "starlette", "urllib3", "uvloop", "xgrammar", "yarl"),
        ),
    ),
}


def fetch(name: str, source: str | None = None, release: str | None = None) -> Path:
    """Bring a project from ``source``, or from where it is published, and return its folder."""
    project, folder = PROJECTS[name], FOLDER / name
    revision, wheels = release or project.revision, project.wheels
    more: tuple[str, ...] = ()
    shutil.rmtree(folder, ignore_errors=True)
    if project.repository:
        _run("git", "clone", "--quiet", source or project.repository, str(folder))
        _run("git", "-C", str(folder), "checkout", "--quiet", revision)
    else:
        wheels = (f"{name}=={revision}", *wheels)
        more = ("--find-links", source) if source else ()
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *more)
    with TemporaryDirectory() as there:
        _run(*pip, "--only-binary", ":all:", "--dest", there, *wheels)
        for wheel in Path(there).iterdir():
            own = wheel.name.startswith(f"{name}-")
            _unpack(wheel, folder, python_only=own and project.python_only)
    return folder


def _unpack(wheel: Path, folder: Path, *, python_only: bool) -> None:
    with ZipFile(wheel) as packed:
        for file in packed.namelist():
            if not python_only or file.endswith(".py") or ".dist-info/" in file:
                packed.extract(file, folder)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("--release", help="another one than the newest: a commit, or a version")
    parser.add_argument(
        "--source", metavar="FOLDER", help="a clone, or wheels, that are there already"
    )
    asked = parser.parse_args()
    print(fetch(asked.project, asked.source, asked.release))
