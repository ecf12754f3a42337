"""Broken copies of the package under test, and their import in place of the original.

Copies are whole trees of files because Triton's interpreter reads the source of its kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.mutants.mutant import Mutant

_PACKAGE = "roseinfer"
_DEPENDENTS = ("pytest_roseinfer.targets", "tests.mutants.kernel_caches")


def source_of(module: str) -> Path:
    """Return the file of a module of the package, without importing it."""
    return _package_folder().parent / Path(*module.split(".")).with_suffix(".py")


def plant(mutant: Mutant | None, folder: Path) -> None:
    """Copy the package into ``folder``, with the bug in it if there is one."""
    shutil.copytree(_package_folder(), folder / _PACKAGE)
    if mutant is not None and mutant.module:
        file = folder / source_of(mutant.module).relative_to(_package_folder().parent)
        file.write_text(mutant.applied_to(file.read_text()))


def import_from(folder: Path) -> None:
    """Import the copy in ``folder`` under the package's name, for the rest of this process."""
    for name in list(sys.modules):
        if name.split(".")[0] == _PACKAGE or name.startswith(_DEPENDENTS):
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    package = importlib.import_module(_PACKAGE)
    imported = Path(str(package.__file__)).parent
    if imported != folder / _PACKAGE:
        raise ImportError(f"{_PACKAGE} was imported from {imported}, not from the copy in {folder}")


def _package_folder() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(f"{_PACKAGE} is not installed")
    return Path(spec.origin).parent
