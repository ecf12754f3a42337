"""Replacement of a module's statements by their syntax tree, independent of names.

A pattern consists of Python statements. Compound ones may have ``...`` for a body that is kept as
it is, with an ``else`` that the pattern leaves out. It matches statements of the same shape. Names
and texts may differ as long as each of the pattern stands for one of the source, and the
replacement uses those of the source. Of several matches, that in the named function is preferred,
then that with the most names in common with the pattern.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_Key = tuple[str, str]
"""Kind of a name in a pattern, and the name."""
_NAMES = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.keyword: "arg",
    ast.FunctionDef: "name",
    ast.ClassDef: "name",
}
"""Field with the identifier, by type of node."""
_KINDS = {ast.Attribute: "attribute", ast.keyword: "keyword", ast.Constant: "text"}
"""Kinds of names other than those of variables and functions, by type of node."""
_BODY = "body"


class NoMatch(Exception):
    """A pattern matches no statements of a module, or several equally well."""


@dataclass(slots=True)
class _Match:
    block: list[ast.stmt]
    """List of statements with the matching ones."""
    begin: int
    end: int
    function: str
    """Qualified name of their function; empty at the top of the module."""
    names: dict[_Key, str] = field(default_factory=dict)
    """Names of the source, by those of the pattern."""
    bodies: list[ast.stmt] = field(default_factory=list)
    """Statements of the source whose bodies are kept, in the order of the pattern."""

    def rank(self, function: str) -> tuple[bool, int]:
        return self.function == function, sum(old == new for (_, old), new in self.names.items())

    def name(self, node: ast.AST, pattern: str, source: str) -> bool:
        key = _key(node, pattern)
        if self.names.setdefault(key, source) != source:
            return False
        return [(one, name) for (one, _), name in self.names.items()].count((key[0], source)) == 1


def _key(node: ast.AST, name: str) -> _Key:
    return _KINDS.get(type(node), "name"), name


def replaced(source: str, function: str, find: str, replace: str) -> str:
    """Replace the statements that match ``find``, by preference in ``function``."""
    module, pattern = ast.parse(source), ast.parse(dedent(find)).body
    matches = list(_matches(module, pattern))
    best = max((match.rank(function) for match in matches), default=None)
    best_matches = [match for match in matches if match.rank(function) == best]
    if len(best_matches) != 1:
        raise NoMatch(f"{len(best_matches)} places match equally well")
    (match,) = best_matches
    new = _Rewritten(match).rewritten(ast.parse(dedent(replace)).body)
    match.block[match.begin : match.end] = new
    match.block[:] = match.block or [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(module))


def _matches(module: ast.Module, pattern: list[ast.stmt]) -> Iterator[_Match]:
    for function, block in _blocks(module, ""):
        for begin in range(len(block) - len(pattern) + 1):
            match = _Match(block, begin, begin + len(pattern), function)
            if _same(pattern, block[begin : match.end], match):
                yield match


def _blocks(node: ast.AST, function: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield every list of statements below a node, with its function."""
    for value in (value for _, value in ast.iter_fields(node) if isinstance(value, list)):
        if value and isinstance(value[0], ast.stmt):
            yield function, value
        for child in (each for each in value if isinstance(each, ast.AST)):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = ".".join(filter(None, [function, child.name]))
            yield from _blocks(child, inner)


def _same(pattern: Any, source: Any, match: _Match) -> bool:
    """Compare two trees, and record in ``match`` the names that those of the pattern stand for."""
    if isinstance(pattern, list):
        return (
            isinstance(source, list)
            and len(pattern) == len(source)
            and all(_same(*pair, match) for pair in zip(pattern, source, strict=True))
        )
    if not isinstance(pattern, ast.AST):
        return bool(pattern == source) and type(pattern) is type(source)
    if type(pattern) is not type(source):
        return False
    if isinstance(pattern, ast.JoinedStr):
        return True
    if isinstance(pattern, ast.Constant) and isinstance(source, ast.Constant):
        texts = pattern.value, source.value
        if all(isinstance(each, str) for each in texts):
            return match.name(pattern, str(texts[0]), str(texts[1]))
    kept = _keeps_body(pattern)
    if kept:
        assert isinstance(source, ast.stmt)
        match.bodies.append(source)
    for name, value in ast.iter_fields(pattern):
        other = getattr(source, name)
        if name == _NAMES.get(type(pattern)) and value is not None:
            if other is None or not match.name(pattern, value, other):
                return False
        elif kept and (name == _BODY or (name == "orelse" and not value)):
            continue
        elif name != "ctx" and not _same(value, other, match):
            return False
    return True


def _keeps_body(node: Any) -> bool:
    body = getattr(node, _BODY, None)
    return (
        isinstance(body, list)
        and len(body) == 1
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and body[0].value.value is ...
    )


class _Rewritten(ast.NodeTransformer):
    """Writes a replacement with the names and the kept bodies of a match."""

    def __init__(self, match: _Match) -> None:
        self.names, self.bodies = match.names, iter(match.bodies)

    def rewritten(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        new = [self.visit(each) for each in statements]
        if next(self.bodies, None) is not None:
            raise NoMatch("the replacement drops a body that the pattern keeps")
        return new

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = self.names.get(_key(node, node.value), node.value)
        elif name := _NAMES.get(type(node)):
            old = getattr(node, name)
            setattr(node, name, self.names.get(_key(node, old), old))
        kept: Any = next(self.bodies, None) if _keeps_body(node) else None
        node = self.generic_visit(node)
        if kept is not None:
            changed: Any = node
            changed.body = kept.body
            if hasattr(kept, "orelse") and not getattr(changed, "orelse", None):
                changed.orelse = kept.orelse
        return node
