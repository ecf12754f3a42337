"""Triton switched on but unavailable: torch operations write and a warning is issued.

A cache on the CPU without the interpreter is such a case on any machine, so these tests run also
where a GPU exists. They run in subprocesses, since interpretation of kernels is decided when they
are imported.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from roseinfer import Condition, Path
from tests.python_process import run_python

NO_INTERPRETER = ""
NO_TRITON = "import sys; sys.modules['triton'] = None"
MACHINES = {"no_interpreter": NO_INTERPRETER, "no_triton_package": NO_TRITON}
REASONS = {
    "no_interpreter": "Triton compiles nothing for cpu, and its interpreter is off",
    "no_triton_package": "the triton package is not installed",
}

CACHE = """
import json, warnings
import torch
from roseinfer import *

def cache(**switches):
    return KVBlockManager(num_layers=1, num_heads=1, head_dim=2, block_size=2,
                          max_blocks_per_layer=32, device="cpu", dtype=torch.float32,
                          policy=AppendPolicy(**switches))

def append(kv, *lists):
    key = torch.arange(2.0 * len(lists)).view(-1, 1, 2) + 1
    kv.append_token_batch(0, list(lists), key, -key)

def show(warned, *caches):
    print(json.dumps({
        "warned": [str(w.message) for w in warned if w.category is TritonUnavailable],
        "counts": [{name.value: n for name, n in kv.path_counts.items() if n} for kv in caches],
    }))
"""

HISTORY = """
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    first, second = cache(), cache()
    a, b = [], []
    for _ in range(3):
        append(first, a, b)
    append(second, [])
    first.incref_blocks(a)
    append(first, a)
show(warned, first, second)
print(first.gather_sequence(0, a)[0].flatten().tolist())
"""


def run_report(code: str, machine: str) -> tuple[dict[str, Any], list[str]]:
    """Return the output of ``show``, and the lines after it."""
    lines = run_python(MACHINES[machine] + CACHE + code, warm=True).splitlines()
    return json.loads(lines[0]), lines[1:]


all_machines = pytest.mark.parametrize("machine", MACHINES)


@all_machines
def test_torch_fallback_is_counted_and_warned_about_once(machine: str) -> None:
    """Two caches, five writes and a clone: one warning in the whole process."""
    report, (tokens,) = run_report(HISTORY, machine)
    (warning,) = report["warned"]
    assert REASONS[machine] in warning
    assert "AppendPolicy(triton=False)" in warning
    first, second = report["counts"]
    assert first[Path.TORCH_SCALAR] == 4
    assert first[Path.CLONE_TORCH] == 1
    assert first[Condition.TRITON_UNAVAILABLE] == 5
    assert second == {
        Path.TORCH_SCALAR: 1,
        Condition.FRESH: 1,
        Condition.TRITON_UNAVAILABLE: 1,
    }
    assert not any("triton_" in name and "unavailable" not in name for name in first)
    assert tokens == "[1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]"


QUIET = """
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    kv = cache(triton=False)
    append(kv, [])
    kv.append_token(0, [], torch.ones(1, 2), torch.ones(1, 2))
small = cache(triton_min_batch=2)  # warns, for larger batches may come
append(small, [])
show(warned, kv, small)
"""


@all_machines
def test_no_warning_with_triton_switched_off(machine: str) -> None:
    """Switched off: no warning. A batch below the threshold: no count."""
    report, _ = run_report(QUIET, machine)
    assert report["warned"] == []
    assert not any(Condition.TRITON_UNAVAILABLE in counts for counts in report["counts"])


WARNINGS_AS_ERRORS = """
kv = cache()
first, second, third = [], [], []
for ids in (first, second):
    kv.append_token(0, ids, torch.ones(1, 2), torch.ones(1, 2))
kv.incref_blocks(second)
lists = [first, second, third]

def state():
    return (kv.keys.tolist(), kv.values.tolist(), lists, kv.num_free_blocks(0),
            [(kv.refcount(id), str(kv.block_info(id))) for id in range(1, 32)],
            {name.value: n for name, n in kv.path_counts.items()})

before = json.dumps(state())
warnings.simplefilter("error", TritonUnavailable)
try:
    append(kv, *lists)
except TritonUnavailable:
    print("rejected, nothing changed" if json.dumps(state()) == before else "half done")
else:
    print("done")
"""


@all_machines
def test_warning_raised_as_an_error_leaves_no_partial_append(machine: str) -> None:
    """With warnings as errors, an append is done whole or not at all."""
    (outcome,) = run_python(MACHINES[machine] + CACHE + WARNINGS_AS_ERRORS, warm=True).splitlines()
    assert outcome in ("done", "rejected, nothing changed")
