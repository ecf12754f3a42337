"""The plugin with bounds checks in a pytest session."""

from __future__ import annotations

import pytest

from tests.python_process import ROOT

SESSION = """
    import contextlib
    import torch, triton, triton.language as tl
    from tests.kernels.calls import CALLS

    @triton.jit
    def _sum_kernel(source, target, TILE: tl.constexpr):
        tl.store(target, tl.sum(tl.load(source + tl.arange(0, TILE)), 0))

    def test_within():
        _sum_kernel[(1,)](torch.ones(4), torch.zeros(1), 4)
        CALLS["clone"][0]()

    def test_beyond():
        with contextlib.suppress(AssertionError):
            _sum_kernel[(1,)](torch.ones(3), torch.zeros(1), 4)

    def test_afterwards():
        pass
"""


@pytest.mark.slow
def test_session_fails_if_a_test_catches_the_error(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(SESSION)
    done = pytester.runpytest_subprocess("-p", "tests.lanes.plugin", "-p", "no:cacheprovider")
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(
        [
            "*OutOfBounds: _sum_kernel reads outside of source (*",
            "*1 _clone_kernel",
            "*2 _sum_kernel",
            "never launched: _add_kernel, *",
        ]
    )


@pytest.mark.slow
def test_session_fails_if_a_kernel_is_not_launched(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(SESSION)
    done = pytester.runpytest_subprocess(
        *("-p", "tests.lanes.plugin", "-p", "no:cacheprovider", "-k", "within"),
        "--require-every-kernel",
    )
    done.assert_outcomes(passed=1, deselected=2)
    assert done.ret == 1
