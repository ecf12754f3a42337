"""``python -m tests.mutation``: draw mutants, try to kill each, and write the page of survivors."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer.settings import SHIPPED_TARGETS
from roseinfer.bench.cases import int_at_least
from roseinfer.cli.model_options import Parser
from roseinfer.terminal import print_status
from tests.conftest import BYTECODE_EXISTS
from tests.mutants.forking import Child
from tests.mutants.warm import warm_up
from tests.mutation import report
from tests.mutation.attempts import Bench, Effort, Result
from tests.mutation.generation import draw
from tests.mutation.planting import functions_of
from tests.mutation.recording import (
    ROOT,
    TEST_FOLDERS,
    keep,
    kept,
    module_name,
    mutated_files,
    record_examples,
    record_tests,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from tests.mutation.generation import Sample
    from tests.mutation.planting import Mutant
    from tests.mutation.recording import Recorded

_MODULES_OF_TARGETS = {target.partition(":")[0] for target in SHIPPED_TARGETS}
_COMMAND = "python -m tests.mutation"
_DESCRIPTION = (
    "Draw mutants of the cache, the engine, decoding, sampling and the oracle, and try to kill "
    "each with the dev profile's examples, then with unit tests. Exit status 0 only when every "
    "survivor has a verdict."
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog=_COMMAND, description=_DESCRIPTION)
    _add_options(parser)
    args = parser.parse_args(argv)
    state = State(Path(args.state))
    sample = state.sample(args.mutants, args.seed)
    warm_up()
    try_examples(state, sample, args)
    try_tests(state, sample, args)
    results = [state.results()[mutant.key] for mutant in sample.mutants]
    print(report.summary(results))
    unmarked = report.unmarked(results)
    for result in unmarked:
        print(f"\nNO VERDICT: {report.describe(result)}")
    if args.write_docs:
        report.write(Path(args.write_docs), results, sample.generated, _command_line(args))
    return int(bool(unmarked))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mutants",
        type=int_at_least(1),
        default=400,
        help="mutants to draw, at least (default: 400)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument(
        "--examples",
        type=int_at_least(0),
        default=0,
        help="examples of each target to run on a mutant, of those that execute its statement "
        "(default: 0, all)",
    )
    parser.add_argument(
        "--test-seconds",
        type=float,
        default=0.0,
        help="processor seconds of unit tests to run on a mutant, cheapest first (default: 0, all)",
    )
    parser.add_argument(
        "--jobs",
        type=int_at_least(1),
        default=os.cpu_count() or 1,
        help="processes at a time (default: one for each CPU)",
    )
    parser.add_argument(
        "--state",
        default=".mutation",
        help="folder of recordings and results, with which a stopped run goes on "
        "(default: .mutation)",
    )
    parser.add_argument("--write-docs", metavar="FILE", help="write the results into this page")


@dataclass(frozen=True, slots=True)
class State:
    """Folder of what a run has done so far."""

    folder: Path

    def sample(self, number: int, seed: int) -> Sample:
        file = self.folder / f"sample-{number}-{seed}.pickle"
        if not file.exists():
            self.folder.mkdir(exist_ok=True)
            print_status("drawing mutants")
            file.write_bytes(pickle.dumps(draw(ROOT, mutated_files(), number, seed)))
        sample: Sample = pickle.loads(file.read_bytes())
        return sample

    def examples(self) -> list[Recorded]:
        return self._recorded("examples", lambda: record_examples(SHIPPED_TARGETS))

    def tests(self) -> list[Recorded]:
        return self._recorded("tests", lambda: record_tests(TEST_FOLDERS))

    def _recorded(self, name: str, record: Callable[[], list[Recorded]]) -> list[Recorded]:
        """Return the recordings of all files with the name; make one, in a child, without any."""
        if not (files := sorted(self.folder.glob(f"{name}*.pickle"))):
            print_status(f"recording the lines of {name}")
            files = [self.folder / f"{name}.pickle"]

            def work() -> str:
                keep(files[0], record())
                return ""

            Child(work).ended()
        return [each for file in files for each in kept(file)]

    def results(self) -> dict[tuple[str, str, str, str], Result]:
        """Return the latest result of each mutant."""
        if not self._results.exists():
            return {}
        lines = self._results.read_text(encoding="utf-8").splitlines()
        return {result.key: result for result in map(Result.from_line, lines)}

    def add(self, result: Result) -> None:
        with self._results.open("a", encoding="utf-8") as file:
            file.write(result.to_line() + "\n")

    @property
    def _results(self) -> Path:
        return self.folder / "results.jsonl"


def try_examples(state: State, sample: Sample, args: argparse.Namespace) -> None:
    """Run the suite's examples on every mutant without a result."""
    bench = _bench(state.examples(), args)
    results = state.results()
    remaining = [each for each in sample.mutants if each.key not in results]
    _attempt_all(state, remaining, bench.try_examples, args.jobs, "examples")


def try_tests(state: State, sample: Sample, args: argparse.Namespace) -> None:
    """Run unit tests on every survivor of the examples."""
    bench = _bench(state.tests(), args)
    results = state.results()
    remaining = [each for each in sample.mutants if results[each.key].needs_tests]

    def attempt(mutant: Mutant) -> Result:
        return bench.try_tests(mutant, results[mutant.key])

    _attempt_all(state, remaining, attempt, args.jobs, "unit tests")


def _bench(work: list[Recorded], args: argparse.Namespace) -> Bench:
    for module in (*map(module_name, mutated_files()), *_MODULES_OF_TARGETS):
        import_module(module)
    return Bench(work, functions_of(ROOT), Effort(args.examples, args.test_seconds))


def _attempt_all(
    state: State,
    mutants: list[Mutant],
    attempt: Callable[[Mutant], Result],
    jobs: int,
    name: str,
) -> None:
    """Try the mutants in several processes, each of which adds its results to the state."""
    os.environ[BYTECODE_EXISTS] = "1"

    def work(share: list[Mutant]) -> str:
        for done, mutant in enumerate(share, 1):
            result = attempt(mutant)
            state.add(result)
            print_status(f"{name}: {done} of {len(share)}: {result.killed_by}")
        return ""

    shares = [mutants[at::jobs] for at in range(jobs)]
    children = [Child(partial(work, share), watch=os.getpid()) for share in shares]
    for child in children:
        child.ended()


def _command_line(args: argparse.Namespace) -> str:
    options = [f"--mutants {args.mutants}", f"--seed {args.seed}"]
    options += [f"--examples {args.examples}"] * bool(args.examples)
    options += [f"--test-seconds {args.test_seconds:g}"] * bool(args.test_seconds)
    return " ".join([_COMMAND, *options])
