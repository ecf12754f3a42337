"""Replacement of statements by their shape, independent of names."""

from __future__ import annotations

import ast
from dataclasses import replace
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.mutants.catalogue import CATALOGUE
from tests.mutants.install import source_of
from tests.mutants.syntax import NoMatch, replaced

if TYPE_CHECKING:
    from tests.mutants.mutant import Mutant

SOURCE = """
class Pool:
    def drop(self, index):
        # A holder less.
        self.refcounts[index] -= 1
        if not self.refcounts[index]:
            self.free.append(index)
        elif self.strict:
            raise ValueError(f"block {index} is held")

    def take(self):
        self.refcounts[0] += 1
"""
HEADER = "if not self.refcounts[index]:\n    ..."


def planted(source: str, find: str, replacement: str, function: str = "Pool.drop") -> str:
    return replaced(dedent(source), function, find, replacement)


def test_statement_is_replaced() -> None:
    broken = planted(SOURCE, "self.refcounts[index] -= 1", "self.refcounts[index] -= 2")
    assert broken == ast.unparse(ast.parse(SOURCE.replace("-= 1", "-= 2")))


def test_omitted_body_is_kept_with_its_else() -> None:
    broken = planted(SOURCE, HEADER, HEADER.replace("not ", ""))
    assert broken == ast.unparse(ast.parse(SOURCE.replace("if not ", "if ")))


def test_renamed_names_match() -> None:
    renamed = SOURCE.replace("index", "block").replace("refcounts", "holders")
    broken = planted(renamed, "self.refcounts[index] -= 1", "self.refcounts[index] -= 2")
    assert broken == ast.unparse(ast.parse(renamed.replace("-= 1", "-= 2")))


def test_statement_moved_to_another_function_matches() -> None:
    moved = SOURCE.replace("def drop", "def release")
    assert "-= 2" in planted(moved, "self.refcounts[index] -= 1", "self.refcounts[index] -= 2")


def test_pattern_name_stands_for_one_name() -> None:
    assert "x - y" not in planted("def drop(x, y):\n    x = x + y\n", "a = a + b", "a = b", "drop")
    with pytest.raises(NoMatch, match="0 places"):
        planted("def drop(x, y):\n    x = x + y\n", "a = a + a", "a = 0", "drop")
    with pytest.raises(NoMatch, match="0 places"):
        planted("def drop(x):\n    x = x + x\n", "a = a + b", "a = 0", "drop")


def test_named_function_is_preferred_and_ambiguity_refused() -> None:
    twice = "def one(x):\n    x += 1\ndef two(x):\n    x += 1\n"
    assert planted(twice, "x += 1", "x += 2", "two").endswith("x += 2")
    with pytest.raises(NoMatch, match="2 places"):
        planted(twice, "x += 1", "x += 2", "three")


def test_empty_replacement_leaves_pass() -> None:
    assert planted("def drop(x):\n    x += 1\n", "x += 1", "", "drop").endswith("pass")


_SUFFIX = "_renamed"


class _Renamed(ast.NodeTransformer):
    """Renames every other function, argument and variable of a module."""

    def __init__(self, module: ast.Module, first: int) -> None:
        nodes = list(ast.walk(module))
        own = {each.arg for each in nodes if isinstance(each, ast.arg)}
        own |= {each.name for each in nodes if isinstance(each, ast.FunctionDef)}
        own |= {
            each.id
            for each in nodes
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        self.own = {*sorted(own)[first::2]}

    def visit(self, node: ast.AST) -> ast.AST:
        for field in ("id", "arg", "name"):
            if getattr(node, field, None) in self.own and not isinstance(node, ast.alias):
                setattr(node, field, getattr(node, field) + _SUFFIX)
        return self.generic_visit(node)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "mutant", [each for each in CATALOGUE if each.module], ids=lambda mutant: mutant.name
)
def test_planted_bug_applies_after_renames(mutant: Mutant, first: int) -> None:
    source = source_of(mutant.module).read_text()
    module = ast.parse(source)
    names = _Renamed(module, first)
    renamed = ast.unparse(names.visit(module))
    function = ".".join(each + _SUFFIX * (each in names.own) for each in mutant.function.split("."))
    broken = replace(mutant, function=function).applied_to(renamed)
    assert broken.replace(_SUFFIX, "") == mutant.applied_to(source)
