"""FlashInfer's append and decode on a GPU: conformance, and the findings of docs/findings."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from pytest_roseinfer import conformance
from pytest_roseinfer.run import coverage
from pytest_roseinfer.targets.flashinfer_pages import FlashInferAdapter
from tests.others.found_scripts import scripts_about

SCRIPTS = scripts_about("FlashInfer")
pytestmark = [
    pytest.mark.roseinfer_gpu,
    pytest.mark.skipif(
        find_spec("flashinfer") is None,
        reason="FlashInfer is not installed: pip install flashinfer-python ninja",
    ),
]


def test_flashinfer_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_coverage = coverage.current()
    coverage.set_current(coverage.Coverage())
    monkeypatch.setenv("FLASHINFER_LOGGING_LEVEL", "warning")
    try:
        tests = conformance(FlashInferAdapter)()
        tests.test_histories()
        tests.test_permuting_a_batch_permutes_the_result()
        tests.test_one_batch_equals_its_split_in_two()
        tests.test_fork_then_append_equals_copy_then_append()
        tests.test_every_option_ends_in_the_same_bits()
    finally:
        coverage.set_current(saved_coverage)


@pytest.mark.parametrize(("script", "printed"), SCRIPTS, ids=range(len(SCRIPTS)))
def test_documented_script_prints_its_output(script: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout == printed, done.stderr
