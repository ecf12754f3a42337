"""Download a project to test with the harness: ``python -m tests.others.fetch nano-vllm``.

It is unpacked into ``.others/`` and imported from there; nothing is installed. An earlier copy is
replaced, for example by another ``--release``.
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
    """URL of the git repository; None for a project that is published as a wheel."""
    revision: str = ""
    """Commit, or release of the wheel that has the project's name."""
    packages: str = ""
    """Folder of the repository that has its packages; "" if they are at its top."""
    wheels: tuple[str, ...] = ()
    """Further packages that the project imports, each without its own dependencies."""
    python_only: bool = False
    """Unpack only Python files and metadata of a wheel of this project: its kernels are large."""


_IMPORTS_OF_VLLM = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "apache-tvm-ffi", "attrs", "cachetools"),
    *("cbor2", "certifi", "charset_normalizer", "cloudpickle", "fastapi", "frozenlist"),
    *("llguidance", "msgspec", "multidict", "openai", "openai_harmony", "psutil"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions"),
    *("partial_json_parser", "prometheus_client", "propcache", "pybase64", "pyzmq"),
    *("requests", "sniffio", "starlette", "urllib3", "uvloop", "xgrammar", "yarl"),
)

PROJECTS = {
    "exllamav3": Origin(revision="1.6.5", python_only=True),
    "kvcached": Origin(
        "https://github.com/ovg-project/kvcached",
        "e8e640638ba79f3ba7ce88d9692342d29d996e6d",
        wheels=("vllm==0.24.0", "sglang==0.5.15", "orjson", *_IMPORTS_OF_VLLM),
    ),
    "lightllm": Origin(
        "https://github.com/ModelTC/LightLLM",
        "87881ae7ca9aa774db744ad38df22c95d80c0eb0",
        wheels=("sortedcontainers",),
    ),
    "lmdeploy": Origin(
        revision="0.18.0",
        python_only=True,
        wheels=(
            *("addict", "apache-tvm-ffi==0.1.11", "mmengine-lite", "msgpack", "platformdirs"),
            *("pybase64", "pyzmq", "shortuuid", "termcolor", "xgrammar", "yapf"),
        ),
    ),
    "mini-sglang": Origin(
        "https://github.com/sgl-project/mini-sglang",
        "20fcd7f3c6a1898a61139fae1c97cc7a40bd8d66",
        packages="python",
        wheels=("msgpack", "pyzmq"),
    ),
    "mlx-lm": Origin(revision="0.32.2", wheels=("mlx==0.32.4", "mlx-cpu==0.32.4")),
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
    "tokasaurus": Origin(
        revision="0.0.4",
        wheels=("art", "dill<0.4", "loguru", "pydra_config", "statsd", "tabulate"),
    ),
    "transformers": Origin(revision="5.23.0", python_only=True),  # another one than is installed
    "vllm": Origin(
        revision="0.33.0",
        python_only=True,
        wheels=_IMPORTS_OF_VLLM,
    ),
}


def sources(name: str, parent: Path | None = None) -> Path:
    """Return the folder from which a project is imported once it is fetched."""
    return (parent or FOLDER) / name / PROJECTS[name].packages


def fetch(
    name: str,
    source: str | None = None,
    release: str | None = None,
    parent: Path | None = None,
) -> Path:
    """Download a project, from ``source`` or its public origin, and return its folder."""
    project, folder = PROJECTS[name], (parent or FOLDER) / name
    revision, wheels = release or project.revision, project.wheels
    pip_options: tuple[str, ...] = ()
    shutil.rmtree(folder, ignore_errors=True)
    if project.repository:
        _run("git", "clone", "--quiet", source or project.repository, str(folder))
        _run("git", "-C", str(folder), "checkout", "--quiet", revision)
    else:
        wheels = (f"{name}=={revision}", *wheels)
        pip_options = ("--find-links", source) if source else ()
    if not wheels:
        return folder
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *pip_options)
    with TemporaryDirectory() as downloads:
        _run(*pip, "--only-binary", ":all:", "--dest", downloads, *wheels)
        for wheel in Path(downloads).iterdir():
            packed = PROJECTS.get(wheel.name.partition("-")[0], Origin())
            _unpack(wheel, sources(name, parent), python_only=packed.python_only)
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
    parser.add_argument("--release", help="a commit or version other than the default one")
    parser.add_argument("--source", metavar="FOLDER", help="an existing clone, or folder of wheels")
    args = parser.parse_args()
    print(fetch(args.project, args.source, args.release))
