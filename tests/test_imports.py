"""Imports of processes that roseinfer starts: what they leave out, and leave as it was."""

from __future__ import annotations

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
