"""Gate that compares the time of a step with that of another revision."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer import settings
from pytest_roseinfer.gates import timing_report
from pytest_roseinfer.gates.gate import CannotCompare, Gate, show_problems
from pytest_roseinfer.gates.worker_process import Side
from pytest_roseinfer.words import OptionError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pytest

    from pytest_roseinfer.gates.timing_report import TimedComparison

# Sides of a comparison: this tree of the project ("here"), and a reference ("there").


OPTION = "--roseinfer-against"
_NOTHING = "neither a path nor NAME==VERSION nor a git revision"
_FETCH_MORE = (
    "this clone is shallow and lacks most revisions: give actions/checkout fetch-depth: 0, or run "
    "git fetch --unshallow origin '+refs/heads/*:refs/remotes/origin/*'"
)


def this_side(folder: Path, found_in: Sequence[str]) -> Side:
    """Return the project in ``folder`` as a side, with the entries of ``sys.path`` inside it."""
    root = folder.resolve()
    inside = [Path(entry or ".").resolve() for entry in found_in]
    inside = [each for each in inside if each.is_relative_to(root) and not _is_installed(each)]
    return Side("here", _existing([*inside, root, root / "src"]))


@contextmanager
def other_side(reference: str, here: Side, folder: Path) -> Iterator[Side]:
    """Build the side that ``reference`` names, outside of the project in ``folder``."""
    root, path = folder.resolve(), (folder / reference).resolve()
    with tempfile.TemporaryDirectory(prefix="roseinfer-") as name:
        built = Path(name).resolve()
        if "==" in reference:
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
            _run(f"{OPTION} {reference}", *pip, "--target", str(built), reference)
            yield Side(reference, (str(built),), here.roots)
            return
        there = path if path.is_dir() else _check_out(reference, root, built)
        # The other tree's counterparts of the folders here; only one tree may have a ``src``.
        roots = _existing(
            [*(there / Path(each).relative_to(root) for each in here.roots), there / "src"]
        )
        yield Side(reference, roots, here.roots)


def require_known(reference: str, folder: Path) -> None:
    """Raise ``OptionError`` if neither a path nor a git revision has this name."""
    if "==" in reference or (folder / reference).is_dir():
        return
    git = ("git", "-C", str(folder))
    try:
        _run("", *git, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}")
    except CannotCompare:
        more = _shallow(git) or did_you_mean(reference, _names(git))
        raise OptionError(f"{OPTION} {reference}: {_NOTHING}{more}") from None


def _shallow(git: Sequence[str]) -> str:
    """Return advice for a shallow clone; "" for any other repository."""
    try:
        shallow = _run("", *git, "rev-parse", "--is-shallow-repository") == "true"
    except CannotCompare:
        return ""
    return f"; {_FETCH_MORE}" if shallow else ""


def _names(git: Sequence[str]) -> list[str]:
    """Return the branches and tags of a repository; empty outside of one."""
    try:
        return _run("", *git, "for-each-ref", "--format=%(refname:short)").split()
    except CannotCompare:
        return []


def _existing(folders: Sequence[Path]) -> tuple[str, ...]:
    return tuple(str(each) for each in dict.fromkeys(folders) if each.is_dir())


def _check_out(revision: str, project: Path, into: Path) -> Path:
    """Clone without copying objects, and return the project's folder in the clone.

    The project's own repository, its worktrees and its index do not change.
    """
    git = ("git", "-C", str(project))
    about = f"{OPTION}: {revision}"
    top = _run(about, *git, "rev-parse", "--show-toplevel")
    commit = _run(about, *git, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    _run(about, *git, "clone", "--quiet", "--shared", "--no-checkout", top, str(into))
    _run(about, "git", "-C", str(into), "checkout", "--quiet", "--detach", commit)
    return into / project.relative_to(Path(top).resolve())


def _run(about: str, *command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", "") or _NOTHING
        raise CannotCompare(f"{about}: {message.strip()}") from error
    return done.stdout.strip()


def _is_installed(folder: Path) -> bool:
    """Return True for a folder of a Python environment inside the project."""
    return folder.is_relative_to(os.path.realpath(sys.prefix)) or "site-packages" in folder.parts


NEXT_TO_OTHERS = (
    "decode steps are not timed in pytest-xdist workers, which would disturb each other; run "
    "them without -n"
)


class TimingGate(Gate):
    """Gate of step times; tests add their comparisons to ``results``."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._built = ExitStack()
        config.add_cleanup(self._built.close)
        self.results: list[TimedComparison] = []
        self._lines: list[str] = []
        self._held_to_baseline = False
        self._found_new = False

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """The sides there and here; both are here without a reference."""
        here = this_side(self._folder, [str(self.config.invocation_params.dir), *sys.path])
        reference = settings.current().timing.against
        if not reference:
            return here, here
        return self._built.enter_context(other_side(reference, here, self._folder)), here

    def require_other_side(self) -> None:
        """Raise ``OptionError`` if the reference does not exist."""
        if reference := settings.current().timing.against:
            require_known(reference, self._folder)

    @property
    def _folder(self) -> Path:
        """Folder of the project.

        Without an ini file, pytest's rootdir may depend on the other side's path.
        """
        has_ini_file = self.config.inipath is not None
        return self.config.rootpath if has_ini_file else self.config.invocation_params.dir

    def held_to_baseline(self, line: str) -> None:
        """Record that a step's time was compared with this GPU's baseline, or written as such."""
        self._held_to_baseline = True
        self._lines.append(line)

    def new_step(self, line: str) -> None:
        """Record a step that the other side does not have."""
        self._found_new = True
        self._lines.append(line)

    def judge(self, *, passed: bool) -> Sequence[str]:
        self._lines += filter(None, (timed.in_words() for timed in self.results))
        problem = self._unused_gate_error() if passed else ""
        return [problem] if problem else []

    def _unused_gate_error(self) -> str:
        """Return an error if the options request this gate and no test used it, or ""."""
        timing = settings.current().timing
        problem = ""
        if timing.paired and not (self.results or self._found_new):
            option = "--roseinfer-against" if timing.against else "--roseinfer-noise-floor"
            problem = f"{option}: no test of this run compared a step"
        elif timing.tpot and not self._held_to_baseline:
            problem = "--roseinfer-tpot: no test of this run compared a step with its baseline"
        if problem and self.config.getoption("numprocesses", None):
            problem += f"; {NEXT_TO_OTHERS}"
        return problem

    def _table(self, form: str) -> str:
        return timing_report.table([timing_report.entry_of(each) for each in self.results], form)

    def in_markdown(self) -> Iterable[str]:
        if not (self.results or self._found_new):
            return
        yield from (f"### roseinfer: decode steps against {self.sides[0].label}", "")
        if self.results:
            yield from (self._table("github"), "")
        yield from (f"- {line}" for line in self._lines)

    def show(self, reporter: pytest.TerminalReporter) -> None:
        if not (self.results or self._lines or self.problems):
            return
        reporter.section("roseinfer: times of decode steps")
        if self.results:
            reporter.line(f"there: {self.results[0].there}")
            reporter.line(self._table("simple"))
        for line in self._lines:
            reporter.line(line)
        show_problems(reporter, self.problems)
