"""LightLLM's radix cache: no finding is known."""

from __future__ import annotations

import pytest

from pytest_roseinfer import conformance, settings
from tests.fresh_run import fresh_run
from tests.others.fetch import sources
from tests.others.lightllm_radix import LightllmRadixAdapter

SOURCES = sources("lightllm")


@pytest.mark.skipif(
    not SOURCES.exists(),
    reason="LightLLM is not downloaded: python -m tests.others.fetch lightllm",
)
@pytest.mark.filterwarnings("ignore")
def test_radix_cache_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SOURCES)
    with fresh_run(settings.Settings(examples=60, steps=20, seed=1)):
        conformance(LightllmRadixAdapter)().test_histories()
