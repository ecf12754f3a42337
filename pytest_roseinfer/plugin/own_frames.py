"""Leaves the harness's own frames out of the traceback of an error that an adapter raised."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

_HARNESS = Path(__file__).parents[1]
_TARGETS = _HARNESS / "targets"


def leave_out_the_harness(error: BaseException, adapter: type) -> None:
    """Have an error's traceback begin where the harness called the adapter, if it did.

    What else the harness was handling at that time, such as a failure that it makes smaller, is no
    context of it.
    """
    files, first = _files_of(adapter), error.__traceback__
    while first and _file(first) not in files:
        first = first.tb_next
    error.__traceback__ = first or error.__traceback__
    while context := error.__context__:
        if context.__traceback__ and _is_harness(Path(_file(context.__traceback__))):
            error.__context__ = None
            return
        error = context


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def _files_of(adapter: type) -> set[str]:
    """Find the files that an adapter and its bases are in, those of the harness left out."""
    modules = (sys.modules.get(each.__module__) for each in adapter.__mro__)
    files = {file for module in modules if (file := getattr(module, "__file__", None))}
    return {file for file in files if not _is_harness(Path(file))}


def _is_harness(file: Path) -> bool:
    """Return True for all that is shipped but the targets, which are as a user's."""
    return file.is_relative_to(_HARNESS) and not file.is_relative_to(_TARGETS)
