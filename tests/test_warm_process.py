"""Warm processes behave as new interpreters."""

from __future__ import annotations

import pytest

from tests.python_process import run_python

PROFILE = """
    from hypothesis import settings
    print(settings.get_current_profile_name())
"""


def test_hypothesis_reads_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks at its import whether it runs in a CI, and the server has imported it before."""
    for name in ("CI", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert run_python(PROFILE, warm=True) == "default\n"
    assert run_python(PROFILE, warm=True, CI="true") == "ci\n"


def test_packages_under_test_are_not_imported() -> None:
    loaded = """
        import sys
        print({"torch", "hypothesis"} <= sys.modules.keys())
        print([name for name in sys.modules if name.startswith(("roseinfer", "pytest_roseinfer"))])
    """
    assert run_python(loaded, warm=True) == "True\n[]\n"


@pytest.mark.slow
def test_assertions_of_plugins_are_rewritten_without_warnings() -> None:
    code = """
        import sys, pytest
        print(type(sys.modules["hypothesis"].__loader__).__name__)
        pytest.main(["--collect-only", "-q", "-W", "error", "no_such_file.py"])
    """
    first, _, output = run_python(code, warm=True).partition("\n")
    assert first == "AssertionRewritingHook"
    assert "Warning" not in output
