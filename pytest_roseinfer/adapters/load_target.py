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

if TYPE_CHECKING:
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
        raise TargetError(_no_module(name, module_name))
    try:
        target: Any = attrgetter(class_name)(module)
    except AttributeError:
        adapters = [each for each, found in vars(module).items() if _is_adapter(found)]
        alike = did_you_mean(class_name, adapters)
        raise TargetError(f"{name}: {module_name} has no {class_name}{alike}") from None
    if not _is_adapter(target):
        raise TargetError(f"{name}: {class_name} is no subclass of KVCacheAdapter or EngineAdapter")
    adapter: type[Adapter] = target
    return adapter


def require_module(name: str) -> None:
    """Refuse a target whose module is not there, without importing what may take long."""
    module_name, _ = _parts(name)
    try:
        found = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise TargetError(_no_module(name, module_name))


def _parts(name: str) -> tuple[str, str]:
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        example = f"such as {SHIPPED_TARGETS[0]}"
        raise TargetError(f"{name!r} is no target: expected package.module:Class, {example}")
    return module_name, class_name


def _no_module(target: str, name: str) -> str:
    """Say that there is no such module, and which there is beside where it would be."""
    parent, dot, last = name.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    beside = [each.name for each in pkgutil.iter_modules(folders)]
    return f"{target}: there is no module {name}{did_you_mean(last, beside, parent + dot)}"


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
