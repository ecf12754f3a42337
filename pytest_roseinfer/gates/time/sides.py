"""Two trees of the same project: the one that is tested, and the one it is compared with."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.time.worker_process import CannotMeasure, Side

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OPTION = "--roseinfer-against"


def this_side(folder: Path, found_in: Sequence[str]) -> Side:
    """The project whose root is ``folder``; of ``found_in``, a ``sys.path``, what lies inside."""
    root = folder.resolve()
    inside = [Path(entry or ".").resolve() for entry in found_in]
    inside = [each for each in inside if each.is_relative_to(root) and not _is_installed(each)]
    roots = dict.fromkeys([*inside, root, root / "src"])
    return Side("here", tuple(str(each) for each in roots if each.is_dir()))


@contextmanager
def other_side(reference: str, here: Side, folder: Path) -> Iterator[Side]:
    """Build what ``reference`` names where it cannot touch the project in ``folder``."""
    path = folder / reference
    with tempfile.TemporaryDirectory(prefix="roseinfer-") as name:
        built = Path(name).resolve()
        if "==" in reference:
            _install(reference, built)
            yield Side(reference, (str(built),), here.roots)
        elif path.is_dir():
            yield _moved(reference, here, folder.resolve(), path.resolve())
        else:
            top = Path(_git(folder, "rev-parse", "--show-toplevel")).resolve()
            _check_out(reference, top, built)
            at = folder.resolve().relative_to(top)
            yield _moved(reference, here, folder.resolve(), built / at)


def _moved(label: str, here: Side, folder: Path, there: Path) -> Side:
    """The folders of ``here``, as they are in another tree; ``src`` may be new, or gone."""
    wanted = [*(there / Path(root).relative_to(folder) for root in here.roots), there / "src"]
    roots = [str(root) for root in dict.fromkeys(wanted) if root.is_dir()]
    return Side(label, tuple(roots), here.roots)


def _check_out(revision: str, top: Path, into: Path) -> None:
    """A clone that borrows the objects: neither worktrees nor the index of ``top`` change."""
    commit = _git(top, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    _git(top, "clone", "--quiet", "--shared", "--no-checkout", str(top), str(into))
    _git(into, "checkout", "--quiet", "--detach", commit)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or "no path, no NAME==VERSION, and no revision of git"
        asked = arguments[-1].removesuffix("^{commit}")
        raise CannotMeasure(f"{OPTION}: {asked}: {said.strip()}") from error
    return done.stdout.strip()


def _install(requirement: str, into: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--target", str(into), requirement], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotMeasure(f"{OPTION} {requirement}: {done.stderr.strip()}")


def _is_installed(folder: Path) -> bool:
    """Return True for a folder of an environment that happens to lie in the project."""
    return folder.is_relative_to(os.path.realpath(sys.prefix)) or "site-packages" in folder.parts
