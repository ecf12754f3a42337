"""Finding the adapter class that somebody named."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.base import Adapter

if TYPE_CHECKING:
    from types import ModuleType


class TargetError(ValueError):
    """A name leads to no adapter; the message says where it ended."""


def load_target(name: str, file: str = "") -> type[Adapter]:
    """Load the adapter class that ``package.module:Class`` names.

    ``file`` is the module's file, whatever else has its name: pytest can import a test file under
    a name that nothing else finds.
    """
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        raise TargetError(f"{name!r} is no target: expected package.module:Class")
    try:
        module = _module(module_name, Path(file) if file else None)
    except Exception as error:
        raise TargetError(f"{name}: {type(error).__name__}: {error}") from error
    if module is None:
        raise TargetError(f"{name}: there is no module {module_name}")
    try:
        target: Any = attrgetter(class_name)(module)
    except AttributeError:
        raise TargetError(f"{name}: {module_name} has no {class_name}") from None
    if not (isinstance(target, type) and issubclass(target, Adapter)):
        raise TargetError(f"{name}: {class_name} is no subclass of KVCacheAdapter or EngineAdapter")
    return target


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
