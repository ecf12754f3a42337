"""Garbage collection while serving: loaded objects are not traversed."""

from __future__ import annotations

from tests.python_process import run_python


def test_full_collection_skips_loaded_objects() -> None:
    code = """
        import gc
        from roseinfer.engine_client.protocol import freeze_gc

        kept = [[number] for number in range(100_000)]
        freeze_gc()
        print(len(gc.get_objects()) < 1000)
    """
    assert run_python(code).strip() == "True"
