"""Loading of an adapter class by its name."""

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

# Lookup of a class in the source of its module, whose import may take seconds


_BINDS_UNSEEN = {"globals", "vars", "exec", "eval", "setattr", "modules", "__dict__", "__path__"}
"""Names that a module may use to bind names, or add modules, that its source does not show."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names in the source of a module."""

    all: frozenset[str]
    """All names that are bound anywhere, functions included."""
    classes: tuple[str, ...]

    @classmethod
    def of_module(cls, spec: ModuleSpec) -> Names | None:
        """Parse a module; return None if only an import can show its names."""
        if not spec.origin or not spec.origin.endswith(".py"):
            return None
        try:
            nodes = list(ast.walk(ast.parse(Path(spec.origin).read_bytes())))
        except (OSError, SyntaxError, ValueError):
            return None  # an import raises a better error
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
    """Find a module without importing its parent packages, unless their code may provide it."""
    top, *attributes = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        path = top
        for part in attributes:
            if spec is None or spec.submodule_search_locations is None:
                return None
            package, path = spec, f"{path}.{part}"
            spec = PathFinder.find_spec(path, list(spec.submodule_search_locations))
            if spec is None and package.origin and Names.of_module(package) is None:
                return importlib.util.find_spec(name)
        return spec
    except KeyError:  # nested namespace packages, whose path is unknown before an import
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


class TargetError(ValueError):
    """Error for a name that is not an adapter's; its message names the part that was not found."""


def load_target(name: str, file: str = "") -> type[Adapter]:
    """Load the adapter class of a name ``package.module:Class``.

    ``file`` is the module's file, in case another module has its name: pytest can import a test
    file under a name that an import does not find.
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
        adapters = [each for each, value in vars(module).items() if _is_adapter(value)]
        raise _no_class(name, adapters) from None
    if not _is_adapter(target):
        raise TargetError(
            f"{name}: {class_name} is not a subclass of KVCacheAdapter or EngineAdapter"
        )
    adapter: type[Adapter] = target
    return adapter


def require_target(name: str) -> None:
    """Raise ``TargetError`` for a missing target, if possible without importing its module."""
    module_name, class_name = _parts(name)
    if module_name in sys.modules:
        load_target(name)
        return
    spec = find_module(module_name)
    if spec is None:
        raise _no_module(name)
    names = Names.of_module(spec)
    if names is not None and class_name.partition(".")[0] not in names.all:
        raise _no_class(name, names.classes)


def _parts(name: str) -> tuple[str, str]:
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        example = f"such as {SHIPPED_TARGETS[0]}"
        raise TargetError(f"{name!r} is not a target: expected package.module:Class, {example}")
    return module_name, class_name


def _no_module(target: str) -> TargetError:
    """Return the error for a missing module, with a similar name from the same package."""
    name, _ = _parts(target)
    parent, dot, last = name.rpartition(".")
    package = find_module(parent) if parent else None
    folders = (package.submodule_search_locations or ()) if package else ()
    siblings = [each.name for each in pkgutil.iter_modules(None if not parent else list(folders))]
    suggestion = did_you_mean(last, siblings, parent + dot)
    return TargetError(f"{target}: there is no module {name}{suggestion}")


def _no_class(target: str, class_names: Iterable[str]) -> TargetError:
    module_name, class_name = _parts(target)
    suggestion = did_you_mean(class_name, class_names)
    return TargetError(f"{target}: {module_name} has no {class_name}{suggestion}")


def _is_adapter(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Adapter)


def _module(name: str, file: Path | None) -> ModuleType | None:
    """Import a module, from ``file`` if that exists; return None if it is not found."""
    try:
        imported = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{name}.".startswith(f"{error.name}.")):
            raise
        imported = None
    if file is None or not file.is_file():
        return imported
    if imported and imported.__file__ and Path(imported.__file__).resolve() == file.resolve():
        return imported
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
