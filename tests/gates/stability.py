"""Equal counts of a step in every process, on an idle machine and on a busy one.

``python -m tests.gates.stability 50`` prints the number of different results of 50 processes,
half of them while every CPU runs two other processes. ``docs/lab/gates.md`` has the results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.step_work import OwnCode, measure_work
from roseinfer import AppendPolicy
from tests.gates.decode_steps import STEPS
from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FAMILIES = ("gpt2", "llama")
_WORK = "while True: sum(range(10_000))"


def results(runs: int, *, loaded: bool, families: Sequence[str] = FAMILIES) -> list[str]:
    """Return the counts of ``runs`` processes with different hash seeds and memory."""
    load = "loaded" if loaded else "rest"
    return [_count_in_a_process(seed, load, *families) for seed in range(1, runs + 1)]


@contextmanager
def _busy() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", _WORK])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _count_in_a_process(hash_seed: int, *arguments: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed), "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.gates.stability", "count", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def count(families: Sequence[str], *, loaded: bool = False) -> str:
    """Return all work of the steps as one text; ``loaded`` keeps every CPU busy meanwhile."""
    policy = AppendPolicy(triton=False)
    own = OwnCode(["roseinfer"])
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1) if loaded else 0):
            stack.enter_context(_busy())
        groups = {
            f"{name}, {family}": measure_work(
                step(family, "cpu", paged_attention=False, append_policy=policy), own, "cpu"
            ).groups
            for name, step in STEPS.items()
            for family in families
        }
    return json.dumps(groups, sort_keys=True) + "\n"


def main(argument: str, *families: str) -> None:
    if argument == "count":
        load, *names = families
        print(count(names, loaded=load == "loaded"), end="")
        return
    at_rest = results(int(argument) // 2, loaded=False)
    busy = results(int(argument) - len(at_rest), loaded=True)
    print(f"{len(at_rest)} runs at rest, {len(busy)} on a busy machine: ", end="")
    print(f"{len({*at_rest, *busy})} different results")


if __name__ == "__main__":
    main(*sys.argv[1:])
