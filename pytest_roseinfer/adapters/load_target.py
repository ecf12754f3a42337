"""Loading an adapter by its name, and the source that its results depend on."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.settings import SHIPPED_TARGETS
from pytest_roseinfer.words import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# Looks a class up in the source of its module, which may take seconds to import.


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


class TargetError(ValueError):
    """A name leads to no adapter; the message says where it ended."""


def load_target(name: str, file: str = "") -> type[Adapter]:
    """Load the adapter class that ``package.module:Class`` names.

    ``file`` is the module's file, whatever else has its name: pytest can import a test file under
    a name that nothing else finds.
    """
    module_name, class_name = _parts(name)
    try:
        module = _module(module_name, Path(file) if file else None)
    except Exception as error:
        raise TargetError(f"{name}: {type(error).__name__}: {error}") from error
    if module is None:
        raise _no_module(name)
    try:
        target: Any = attrgetter(class_name)(module)
    except AttributeError:
        adapters = [each for each, found in vars(module).items() if _is_adapter(found)]
        raise _no_class(name, adapters) from None
    if not _is_adapter(target):
        raise TargetError(f"{name}: {class_name} is no subclass of KVCacheAdapter or EngineAdapter")
    adapter: type[Adapter] = target
    return adapter


def require_target(name: str) -> None:
    """Refuse a target that is not there, without importing its module, which may take long."""
    module_name, class_name = _parts(name)
    if module_name in sys.modules:
        load_target(name)
        return
    found = find_module(module_name)
    if found is None:
        raise _no_module(name)
    names = Names.of_module(found)
    if names is not None and class_name.partition(".")[0] not in names.all:
        raise _no_class(name, names.classes)


def _parts(name: str) -> tuple[str, str]:
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        example = f"such as {SHIPPED_TARGETS[0]}"
        raise TargetError(f"{name!r} is no target: expected package.module:Class, {example}")
    return module_name, class_name


def _no_module(target: str) -> TargetError:
    """Say that there is no such module, and which there is beside where it would be."""
    name, _ = _parts(target)
    parent, dot, last = name.rpartition(".")
    package = find_module(parent) if parent else None
    folders = (package.submodule_search_locations or ()) if package else ()
    beside = [each.name for each in pkgutil.iter_modules(None if not parent else list(folders))]
    alike = did_you_mean(last, beside, parent + dot)
    return TargetError(f"{target}: there is no module {name}{alike}")


def _no_class(target: str, known: Iterable[str]) -> TargetError:
    module_name, class_name = _parts(target)
    alike = did_you_mean(class_name, known)
    return TargetError(f"{target}: {module_name} has no {class_name}{alike}")


def _is_adapter(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Adapter)


def _module(name: str, file: Path | None) -> ModuleType | None:
    """Import a module, from ``file`` if there is such a file; None when there is none."""
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{name}.".startswith(f"{error.name}.")):
            raise
        found = None
    if file is None or not file.is_file():
        return found
    if found and found.__file__ and Path(found.__file__).resolve() == file.resolve():
        return found
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
