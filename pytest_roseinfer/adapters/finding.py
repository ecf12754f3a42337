"""Finding the adapter class that somebody named."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from pytest_roseinfer.adapters.base import Adapter


class TargetError(ValueError):
    """A name that leads to no adapter; the message says where it ended."""


def load_target(name: str, file: str = "") -> type[Adapter]:
    """The adapter class that ``package.module:Class`` names.

    With ``file``, that file is the module, whatever else goes by its name: pytest can import
    a test file under a name that nothing else finds.
    """
    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.adapters.engine import EngineAdapter

    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        raise TargetError(f"{name!r} is no target: expected package.module:Class")
    module = _module(name, module_name, Path(file) if file else None)
    try:
        target: Any = attrgetter(class_name)(module)
    except AttributeError:
        raise TargetError(f"{name}: {module_name} has no {class_name}") from None
    if not (isinstance(target, type) and issubclass(target, (KVCacheAdapter, EngineAdapter))):
        raise TargetError(f"{name}: {class_name} is no subclass of KVCacheAdapter or EngineAdapter")
    return target


def _module(target: str, name: str, file: Path | None) -> ModuleType:
    try:
        found = _imported(name)
        if file is not None and file.is_file() and not (found and _is_from(found, file)):
            return _from_file(name, file)
    except Exception as error:
        raise TargetError(f"{target}: {type(error).__name__}: {error}") from error
    if found is None:
        raise TargetError(f"{target}: there is no module {name}")
    return found


def _imported(name: str) -> ModuleType | None:
    """The module of that name, or None when there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _is_from(module: ModuleType, file: Path) -> bool:
    return bool(module.__file__) and Path(str(module.__file__)).resolve() == file.resolve()


def _from_file(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
