"""Examples of the dev profile and unit tests, with the lines that each executes."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.load_target import load_target
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.interpreter import fast_interpreter
from pytest_roseinfer.search.search import Search
from pytest_roseinfer.settings import PROFILES, Settings
from pytest_roseinfer.suite.conformance import conformance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "roseinfer/kv",
    "roseinfer/engine",
    "roseinfer/decode",
    "roseinfer/sampling.py",
    "roseinfer/sampling_params.py",
    "pytest_roseinfer/oracle",
)
"""Folders and files whose mutants count."""
TEST_FOLDERS = (
    "tests/kv",
    "tests/engine",
    "tests/decode",
    "tests/sampling",
    "tests/guided",
    "tests/oracle",
    "tests/histories",
    "tests/capabilities",
)
"""Folders with the unit tests of the mutated folders."""
PYTEST_OPTIONS = (
    "-q",
    "-p",
    "no:cacheprovider",
    # The plugin is imported already, and Hypothesis has been used.
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
    "-W",
    "ignore::hypothesis.errors.HypothesisSideeffectWarning",
)
Lines = dict[str, frozenset[int]]
"""Executed lines by file, relative to the root."""


def mutated_files() -> list[Path]:
    """Return the files whose mutants count."""
    places = [ROOT / each for each in FOLDERS]
    return [file for place in places for file in (sorted(place.glob("*.py")) or [place])]


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@dataclass(slots=True)
class Recorded:
    """Example of the shipped suite, or unit test."""

    name: str
    """Check of the example, or id of the test."""
    seconds: float
    """Processor seconds, with lines recorded."""
    lines: Lines = field(default_factory=dict)
    target: str = ""
    """Target of the example; empty for a unit test."""
    example: Any = None
    reached: frozenset[str] = frozenset()
    """Paths that the example reached."""

    def executes(self, file: str, lines: frozenset[int]) -> bool:
        return bool(self.lines.get(file, frozenset()) & lines)


class _Recorder:
    """Lines of each piece of work, which coverage keeps by its number."""

    def __init__(self) -> None:
        self.pieces: list[Recorded] = []
        from coverage import Coverage

        self._coverage = Coverage(
            data_file=None,
            config_file=False,
            include=[*map(str, mutated_files())],
        )

    @contextmanager
    def recording(self) -> Iterator[_Recorder]:
        self._coverage.start()
        try:
            yield self
        finally:
            self._coverage.stop()
            self._read_lines()

    @contextmanager
    def piece(self, name: str, **more: Any) -> Iterator[Recorded]:
        """Record the work of the context."""
        recorded = Recorded(name, 0.0, **more)
        self._coverage.switch_context(str(len(self.pieces)))
        self.pieces.append(recorded)
        began = time.process_time()
        try:
            yield recorded
        finally:
            recorded.seconds = time.process_time() - began
            self._coverage.switch_context("")

    def _read_lines(self) -> None:
        data = self._coverage.get_data()
        for file in data.measured_files():
            by_piece: dict[str, set[int]] = {}
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in contexts:
                    by_piece.setdefault(context, set()).add(line)
            by_piece.pop("", None)
            for number, lines in by_piece.items():
                relative = str(Path(file).relative_to(ROOT))
                self.pieces[int(number)].lines[relative] = frozenset(lines)


def record_examples(
    targets: Sequence[str], *, examples: int = PROFILES["dev"].examples
) -> list[Recorded]:
    """Run the dev profile on the targets; return its examples, in their order."""
    dev = Settings(examples=examples, search_seconds=0, seed=0, targets=(*targets,))
    settings.set_current(dev)
    coverage.set_current(coverage.Coverage())
    with _Recorder().recording() as recorder, fast_interpreter():
        for target in targets:
            check_once = _recording(Search[Any].check_once, recorder, target)
            with patch.object(Search, "check_once", check_once):
                tests = conformance(load_target(target))()
                for name in tests.shipped():
                    try:
                        getattr(tests, name)()
                    except pytest.skip.Exception:
                        continue
    return recorder.pieces


def _recording(
    check_once: Callable[..., None], recorder: _Recorder, target: str
) -> Callable[..., None]:
    def recorded_check(search: Search[Any], example: Any) -> None:
        counts = coverage.current().of(search.adapter)
        before = Counter(counts.counts), Counter(counts.large_counts)
        with recorder.piece(search.name, target=target, example=example) as piece:
            check_once(search, example)
        after = Counter(counts.counts) - before[0] + (Counter(counts.large_counts) - before[1])
        piece.reached = frozenset(after) & counts.paths.keys()

    return recorded_check


class _TestRecorder:
    """Plugin of pytest that records each test."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with self._recorder.piece(item.nodeid):
            return (yield)


def record_tests(folders: Sequence[str]) -> list[Recorded]:
    """Run the unit tests of some folders; return those that execute a mutated folder.

    As in runs that name no test, a sample of those with many similar cases is run.
    """
    with _Recorder().recording() as recorder:
        arguments = [*PYTEST_OPTIONS, "-o", f"testpaths={' '.join(folders)}"]
        status = pytest.main(arguments, plugins=[_TestRecorder(recorder)])
    if status:
        raise RuntimeError(f"unit tests fail without a mutant: exit status {status}")
    return [piece for piece in recorder.pieces if piece.lines]


def keep(file: Path, pieces: list[Recorded]) -> None:
    """Write what was recorded to a file, for runs that go on after a stop."""
    file.write_bytes(pickle.dumps(pieces))


def kept(file: Path) -> list[Recorded]:
    pieces: list[Recorded] = pickle.loads(file.read_bytes())
    return pieces
