"""Mutants, and how one is planted in a running process: its code replaces a function's."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """Change of one statement."""

    file: str
    """File, relative to the root."""
    function: str
    """Qualified name of the outermost function with the change, as in ``__qualname__``."""
    lines: frozenset[int]
    """Lines of the changed statement."""
    before: str
    """Changed lines, without indentation."""
    after: str
    source: str
    """Text of the file with the change."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Identity that survives changes elsewhere in the file."""
        return self.file, self.function, self.before, self.after


class NotPlanted(Exception):
    """The mutant's function does not exist in this process, or its code does not fit."""


def functions_of(root: Path) -> dict[tuple[str, str], list[FunctionType]]:
    """Return this process's functions of the package, by file and qualified name.

    All objects are excluded from garbage collection afterwards, for forks to share.
    """
    gc.unfreeze()  # frozen ones are not listed
    gc.collect()
    functions: dict[tuple[str, str], list[FunctionType]] = {}
    for each in gc.get_objects():
        # isinstance would call properties of strange objects.
        if type(each) is FunctionType and each.__code__.co_filename.startswith(f"{root}/"):
            name = each.__code__.co_filename.removeprefix(f"{root}/")
            functions.setdefault((name, each.__code__.co_qualname), []).append(each)
    gc.freeze()
    return functions


def plant(mutant: Mutant, root: Path, functions: dict[tuple[str, str], list[FunctionType]]) -> None:
    """Replace the code of the mutant's function for the rest of this process."""
    code = compile(mutant.source, str(root / mutant.file), "exec", dont_inherit=True)
    wanted = [each for each in _codes(code) if each.co_qualname == mutant.function]
    existing = functions.get((mutant.file, mutant.function), [])
    if len(wanted) != 1 or not existing:
        raise NotPlanted(f"{mutant.file}: {mutant.function}: {len(existing)} functions exist")
    for function in existing:
        if function.__code__.co_freevars != wanted[0].co_freevars:
            raise NotPlanted(f"{mutant.file}: {mutant.function}: other variables of a closure")
        function.__code__ = wanted[0]


def _codes(code: CodeType) -> list[CodeType]:
    """Return the code of every function, without those inside of others."""
    found: list[CodeType] = []
    for each in code.co_consts:
        if isinstance(each, CodeType):
            # A class has a code as well, which leads to those of its methods.
            is_function = bool(each.co_flags & 0x2)
            found += [each] if is_function else _codes(each)
    return found
