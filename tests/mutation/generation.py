"""Mutants of mutmut: one changed expression or statement in a function, and a sample of all.

mutmut leaves decorated functions out, because its trampolines cannot replace them. Here a mutant
replaces a function's code, so decorators are hidden from it. Left out are texts, which are messages
and names, and defaults of arguments and fields, which run when a module is imported.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import libcst
from mutmut.mutation.file_mutation import create_mutations

from tests.mutation.planting import Mutant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DECORATOR = "#hidden@"


class Module:
    """Source file and everything that mutmut can change in it."""

    def __init__(self, root: Path, file: Path) -> None:
        self.name = str(file.relative_to(root))
        self.source = file.read_text(encoding="utf-8")
        self._tree = ast.parse(self.source)
        self._module, mutations, _, _ = create_mutations(self.name, self._without_decorators())
        self.mutations: list[Any] = [
            each
            for each in mutations
            if isinstance(each.contained_by_top_level_function, libcst.FunctionDef)
            and not isinstance(each.original_node, libcst.BaseString)
        ]

    def mutant(self, number: int) -> Mutant | None:
        """Return a mutant; None if it changes nothing that a function does when it is called."""
        mutation = self.mutations[number]
        changed: Any = self._module.deep_replace(mutation.original_node, mutation.mutated_node)
        source = changed.code.replace(_DECORATOR, "@")
        old, new = self.source.splitlines(), source.splitlines()
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        changes = [each for each in matcher.get_opcodes() if each[0] != "equal"]
        if not changes or not _compiles(source):
            return None
        begin, end = changes[0][1], max(changes[-1][2], changes[0][1] + 1)
        new_begin, new_end = changes[0][3], changes[-1][4]
        function = self._function_at(begin + 1)
        if function is None:
            return None
        name, node = function
        lines = frozenset(range(begin + 1, end + 1)) | _statement_lines(node, begin + 1)
        return Mutant(
            self.name,
            name,
            lines,
            _stripped(old[begin:end]),
            _stripped(new[new_begin:new_end]),
            source,
        )

    def _without_decorators(self) -> str:
        lines = self.source.splitlines(keepends=True)
        for _, node in self._functions:
            for decorator in node.decorator_list:
                for at in range(decorator.lineno - 1, decorator.end_lineno or decorator.lineno):
                    lines[at] = re.sub("@", _DECORATOR, lines[at], count=1)
        return "".join(lines)

    @cached_property
    def _functions(self) -> list[tuple[str, _Function]]:
        """Functions and methods with their names, without those inside of others."""
        return [*_outer_functions(self._tree, "")]

    def _function_at(self, line: int) -> tuple[str, _Function] | None:
        """Return the function whose body has the line."""
        for name, node in self._functions:
            if node.body[0].lineno <= line <= (node.end_lineno or line):
                return name, node
        return None


def _outer_functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _outer_functions(child, f"{prefix}{child.name}.")


def _statement_lines(function: _Function, line: int) -> frozenset[int]:
    """Return the lines of the innermost statement around a line, or of its header."""
    lines: frozenset[int] = frozenset()
    for node in ast.walk(function):
        if node is function or not isinstance(node, ast.stmt | ast.ExceptHandler):
            continue
        body: Sequence[ast.stmt] = getattr(node, "body", ())
        end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        own = frozenset(range(node.lineno, max(end, node.lineno) + 1))
        if line in own and (not lines or len(own) <= len(lines)):
            lines = own
    return lines


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _stripped(lines: Sequence[str]) -> str:
    return "\n".join(line.strip() for line in lines)


@dataclass(frozen=True, slots=True)
class Sample:
    """Mutants drawn from all, a share of each file."""

    mutants: list[Mutant]
    generated: int
    """Number of all mutants that they were drawn from."""


def draw(root: Path, files: Sequence[Path], number: int, seed: int) -> Sample:
    """Draw at least ``number`` mutants, as large a share of each file, in a random order."""
    modules = [Module(root, file) for file in files]
    generated = sum(len(module.mutations) for module in modules)
    share = min(1.0, number / max(1, generated))
    drawn: list[Mutant] = []
    for module in modules:
        source = random.Random(f"{seed} {module.name}")
        numbers = source.sample(range(len(module.mutations)), len(module.mutations))
        wanted = -int(-share * len(module.mutations) // 1)
        mutants: dict[tuple[str, str, str, str], Mutant] = {}
        for each in numbers:
            if len(mutants) == wanted:
                break
            if mutant := module.mutant(each):
                mutants.setdefault(mutant.key, mutant)
        drawn += mutants.values()
    random.Random(seed).shuffle(drawn)
    return Sample(drawn, generated)
