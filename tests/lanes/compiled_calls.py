"""``python -m tests.lanes.compiled_calls [FAMILY NUMBER]`` calls every kernel, compiled, on a GPU.

With a family and the number of its planted access, only the call that makes this access.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch

from tests.kernels import calls
from tests.lanes.planted import FAMILIES, module_with

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def main(argv: Sequence[str]) -> None:
    if not argv:
        run(calls.CALLS, "cuda")
        return
    family, number = argv
    planted = FAMILIES[family][int(number)]
    with tempfile.TemporaryDirectory() as folder:
        module = module_with(planted, family, Path(folder))
        with mock.patch.object(calls, family, module):
            run([planted.call], "cuda")


@torch.inference_mode()
def run(names: Iterable[str], device: str) -> None:
    """Make these calls twice, because launchers reuse cached state in the second."""
    for name in names:
        call, _ = calls.CALLS[name]
        for _ in range(2):
            with torch.device(device):
                call()
        if device == "cuda":  # report an error at the call that caused it
            torch.cuda.synchronize()
        print(f"called: {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
