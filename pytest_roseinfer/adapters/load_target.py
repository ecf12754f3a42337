"""Finding the adapter class that somebody named."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.base import Adapter
from pytest_roseinfer.mistakes import did_you_mean
from pytest_roseinfer.settings import SHIPPED_TARGETS
from pytest_roseinfer.target_source import Names, find_module

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType


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
