"""Each CUDA C++ file alone against compilers, with its sizes and without them."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from roseinfer.kernels.cuda.toolchain import inline_headers
from tests.cuda_syntax import NVCC, defines_of, emulation_errors, nvcc_errors, source_names
from tests.kernels.cuda.whole_step.emulated import COMPILER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Errors = Callable[[str, Mapping[str, int], Path], str]

pytestmark = pytest.mark.slow

NAMES = source_names()
KERNELS = [name for name in NAMES if name.endswith(".cu")]
CHECKS = [
    pytest.param(
        nvcc_errors,
        id="nvcc",
        marks=pytest.mark.skipif(NVCC is None, reason="nvcc is not installed"),
    ),
    pytest.param(
        emulation_errors,
        id="emulated",
        marks=pytest.mark.skipif(COMPILER is None, reason="g++ is not installed"),
    ),
]


@pytest.mark.parametrize("errors", CHECKS)
def test_each_file_alone_is_accepted(errors: Errors, tmp_path: Path) -> None:
    for name in NAMES:
        assert not errors(name, defines_of(name), tmp_path)


@pytest.mark.parametrize("errors", CHECKS)
def test_missing_sizes_are_named(errors: Errors, tmp_path: Path) -> None:
    for name in KERNELS:
        message = errors(name, {}, tmp_path).partition("#error")[2].partition("\n")[0]
        assert all(macro in message for macro in defines_of(name)), name


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("name", KERNELS)
def test_each_size_is_needed(name: str, tmp_path: Path) -> None:
    defines = defines_of(name)
    for missing in defines:
        others = {macro: value for macro, value in defines.items() if macro != missing}
        assert "#error" in emulation_errors(name, others, tmp_path), missing


def test_headers_are_inlined_once_with_their_lines() -> None:
    headers = {"a.cuh": "#pragma once\nint a;", "b.cuh": '#include "a.cuh"\nint b;'}
    text = inline_headers('#include "a.cuh"\n#include "b.cuh"\nint c;\n', headers, "c.cu")
    assert text.splitlines() == [
        '#line 1 "c.cu"', '#line 1 "a.cuh"', "", "int a;",
        '#line 2 "c.cu"', '#line 1 "b.cuh"', '#line 2 "b.cuh"', "int b;",
        '#line 3 "c.cu"', "int c;",
    ]  # fmt: skip


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
def test_a_message_names_the_line_of_a_header(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    text = inline_headers('#include "a.cuh"\nint c;\n', {"a.cuh": "\nint a = b;"}, "c.cu")
    source.write_text(text)
    command = [str(COMPILER), "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "a.cuh:2:" in done.stderr
