"""Looks a class up in the source of its module, which may take seconds to import."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_BINDS_UNSEEN = {"globals", "vars", "exec", "eval", "setattr", "modules", "__dict__", "__path__"}
"""Where a module mentions one of these it may have names, or modules, that nobody can see."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names in the source of a module."""

    all: frozenset[str]
    """Every name that is bound anywhere, be it within a function."""
    classes: tuple[str, ...]

    @classmethod
    def of_module(cls, spec: ModuleSpec) -> Names | None:
        """Return None where only importing the module tells which names it has."""
        if not spec.origin or not spec.origin.endswith(".py"):
            return None
        try:
            nodes = list(ast.walk(ast.parse(Path(spec.origin).read_bytes())))
        except (OSError, SyntaxError, ValueError):
            return None  # which importing says better
        names: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                if name in _BINDS_UNSEEN:
                    return None
                if isinstance(node.ctx, ast.Store):
                    names.add(name)
        if names & {"*", "__getattr__"}:
            return None
        classes = tuple(node.name for node in nodes if isinstance(node, ast.ClassDef))
        return cls(frozenset(names), classes)


def find_module(name: str) -> ModuleSpec | None:
    """Find a module, and import none of the packages around it unless they could hide it."""
    top, *rest = name.split(".")
    try:
        found = importlib.util.find_spec(top)
        path = top
        for part in rest:
            if found is None or found.submodule_search_locations is None:
                return None
            package, path = found, f"{path}.{part}"
            found = PathFinder.find_spec(path, list(found.submodule_search_locations))
            if found is None and package.origin and Names.of_module(package) is None:
                return importlib.util.find_spec(name)
        return found
    except KeyError:  # a folder without __init__.py in one without: its place is not known yet
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
