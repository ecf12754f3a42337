"""Check the syntax of each CUDA C++ file by itself: ``python -m tests.cuda_syntax``.

nvcc checks it for a GPU, where it is installed; g++ checks it for the emulated machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda.decode_attention import RowSizes
from roseinfer.kernels.cuda.paired import PairedSizes
from roseinfer.kernels.cuda.prefill_attention import PromptSizes
from roseinfer.kernels.cuda.streamed import tiles_for
from tests.kernels.cuda.whole_step.emulated import COMPILER, EMULATION, INCLUDES
from tests.kernels.cuda.whole_step.small_models import small_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.kernels.cuda.whole_step.emulated import Sizes

SOURCES = Path(toolchain.__file__).parent / "source"
NVCC = shutil.which("nvcc")
_ARCHITECTURE = "sm_90a"
_SIZES: dict[str, Sizes] = {
    "decode_attention.cu": RowSizes(64, 4, 64, 4, 4),
    "paired.cu": PairedSizes.choose(gates=False),
    "prefill_attention.cu": PromptSizes(64, 4, 64),
    "streamed.cu": tiles_for(64, 1),
    "whole_step.cu": small_sizes(16),
}
"""Sizes of one configuration of each kernel."""
_STEP = "step_"
"""Prefix of the headers that need the sizes of ``whole_step.cu``."""
_WGMMA = toolchain.wgmma_header(
    accumulate=(tiles_for(64, 1).columns, 64, 128), overwrite=(64, 128), registers=(72,)
)


def source_names() -> list[str]:
    """Return the names of all files."""
    return sorted(path.name for path in SOURCES.iterdir())


def defines_of(name: str) -> dict[str, int]:
    """Return the macros that a file needs."""
    sizes = _SIZES.get("whole_step.cu" if name.startswith(_STEP) else name)
    return sizes.defines() if sizes else {}


def nvcc_errors(name: str, defines: Mapping[str, int], folder: Path) -> str:
    """Return what nvcc writes about a file; empty if it accepts the file."""
    flags = [f"-arch={_ARCHITECTURE}", "--fmad=false", "-fdevice-syntax-only", "-c"]
    return _errors([str(NVCC), *flags, "-o", "/dev/null"], name, defines, _WGMMA, folder)


def emulation_errors(name: str, defines: Mapping[str, int], folder: Path) -> str:
    """Return what g++ writes about a file for the emulated machine; empty if it accepts it."""
    flags = [f"-I{INCLUDES}", "-w", "-fsyntax-only", "-x", "c++"]
    return _errors([str(COMPILER), *flags], name, defines, EMULATION, folder)


def _errors(
    command: list[str],
    name: str,
    defines: Mapping[str, int],
    headers: Mapping[str, str],
    folder: Path,
) -> str:
    """Copy the files and ``headers`` to ``folder``, and compile one that includes the named one."""
    for source in source_names():
        shutil.copy(SOURCES / source, folder)
    for header, text in headers.items():
        (folder / header).write_text(text)
    alone = folder / "alone.cu"
    alone.write_text(f'#include "{name}"\n')
    macros = [f"-D{macro}={value}" for macro, value in defines.items()]
    done = subprocess.run(
        [*command, "-std=c++17", *macros, str(alone)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return (done.stdout or f"exit code {done.returncode}") if done.returncode else ""


def main() -> int:
    """Check all files by the compilers that are installed; return 1 if one is not accepted."""
    checks = {"nvcc": (NVCC, nvcc_errors), "g++": (COMPILER, emulation_errors)}
    failed = False
    for compiler, (path, errors) in checks.items():
        if path is None:
            print(f"{compiler}: not installed")
            continue
        for name in source_names():
            with tempfile.TemporaryDirectory() as folder:
                found = errors(name, defines_of(name), Path(folder))
            print(f"{compiler}: {name}: {found or 'accepted'}")
            failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
