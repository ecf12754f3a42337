"""A warm process begins as a new interpreter would, where that can be seen."""

from __future__ import annotations

import pytest

from tests.python_process import run_python

PROFILE = """
    from hypothesis import settings
    print(settings.get_current_profile_name())
"""


def test_hypothesis_reads_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was imported in another one, and sees there whether it is in a CI."""
    for name in ("CI", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert run_python(PROFILE, warm=True) == "default\n"
    assert run_python(PROFILE, warm=True, CI="true") == "ci\n"


def test_nothing_under_test_is_imported() -> None:
    loaded = """
        import sys
        print({"torch", "hypothesis"} <= sys.modules.keys())
        print([name for name in sys.modules if name.startswith(("roseinfer", "pytest_roseinfer"))])
    """
    assert run_python(loaded, warm=True) == "True\n[]\n"


@pytest.mark.takes_long
def test_assertions_of_plugins_are_rewritten_and_nothing_warns_of_it() -> None:
    code = """
        import sys, pytest
        print(type(sys.modules["hypothesis"].__loader__).__name__)
        pytest.main(["--collect-only", "-q", "-W", "error", "no_such_file.py"])
    """
    first, _, said = run_python(code, warm=True).partition("\n")
    assert first == "AssertionRewritingHook"
    assert "Warning" not in said
