"""vLLM's sources, without which its tests are skipped."""

from __future__ import annotations

import pytest

from tests.others.fetch import FOLDER

SOURCES = FOLDER / "vllm"

needs_vllm = pytest.mark.skipif(
    not SOURCES.exists(), reason="vLLM is not downloaded: python -m tests.others.fetch vllm"
)
searches_vllm = [pytest.mark.usefixtures("vllm_sources"), needs_vllm]
"""Marks of tests that search vLLM with a fixed seed."""
