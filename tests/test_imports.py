"""Imports of processes that roseinfer starts: what they leave out, and leave as it was."""

from __future__ import annotations

import threading

import pytest
import torch

from roseinfer.cli import model_options
from tests.python_process import run_python

_FAKES = """
    import sys
    from pathlib import Path
    from tempfile import mkdtemp
    folder = Path(mkdtemp())
    for name in ("scipy", "sklearn"):
        (folder / (name + ".py")).write_text("")
    sys.path.insert(0, str(folder))
    {before}
    from roseinfer.imports import quick_imports
    import gc
    from importlib.util import find_spec
    with quick_imports():
        inside = [find_spec(name) is not None for name in ("scipy", "sklearn")], gc.isenabled()
    import scipy, sklearn
    print(*inside, gc.isenabled())
"""


def test_hidden_libraries_can_be_imported_later() -> None:
    assert run_python(_FAKES.format(before="")) == "[False, False] False True\n"


def test_imported_libraries_stay() -> None:
    code = _FAKES.format(before="import sklearn")
    assert run_python(code) == "[False, True] False True\n"


def test_engine_process_begins_without_torch() -> None:
    """So what its command imports is imported quickly."""
    code = "import sys, roseinfer.engine_client.child; print('torch' in sys.modules)"
    assert run_python(code) == "False\n"


@pytest.mark.parametrize("fails", [False, True])
def test_gpu_context_begins_on_the_device(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A failure is left to the loading of the model, which says what the user can do."""
    begun: list[str] = []
    unexpected: list[object] = []

    def empty(_: int, *, device: str) -> None:
        begun.append(device)
        if fails:
            raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(threading, "excepthook", unexpected.append)
    for device in (None, "cuda:9"):
        model_options._begin_gpu_context(device)
        for thread in threading.enumerate():
            if thread.name == "roseinfer GPU context":
                thread.join()
    assert begun == ["cuda", "cuda:9"]
    assert not unexpected
