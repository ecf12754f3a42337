"""Garbage collection: it waits where it must, and does not look at loaded objects."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from roseinfer.cli import model_options
from roseinfer.garbage import gc_disabled
from tests.python_process import run_python


def test_full_collection_skips_loaded_objects() -> None:
    code = """
        import gc
        from roseinfer.garbage import freeze_gc

        kept = [[number] for number in range(100_000)]
        freeze_gc()
        print(len(gc.get_objects()) < 1000)
    """
    assert run_python(code).strip() == "True"


def test_collection_goes_on_as_before() -> None:
    with pytest.raises(KeyError), gc_disabled():
        raise KeyError
    assert gc.isenabled()
    with gc_disabled():
        with gc_disabled():
            pass
        assert not gc.isenabled()


def test_commands_import_without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Llm(ModuleType):
        def __getattr__(self, name: str) -> object:
            if name == "LLM":
                seen.append(gc.isenabled())
                return lambda *_, **__: seen.append(gc.isenabled())
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "roseinfer.llm", Llm("roseinfer.llm"))
    args = model_options.Parser().parse_args([])
    for name in ("model", "device", "dtype", "tensor_parallel_size"):
        setattr(args, name, None)
    monkeypatch.setattr(model_options, "parsed_fields", lambda *_: {})
    model_options.load_llm(args, "test")
    assert seen == [False, True]
