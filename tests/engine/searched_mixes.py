"""Search for a mix of requests that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as hypothesis_seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer.engines.run import run_mix
from pytest_roseinfer.engines.strategies import request_mixes

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.engine import EngineAdapter, RequestMix


def search(adapter: type[EngineAdapter], examples: int, seed: int = 1) -> None:
    """Serve drawn mixes until one fails."""

    @hypothesis_seed(seed)
    @hypothesis_settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(request_mixes(adapter))
    def serve(drawn: RequestMix) -> None:
        run_mix(adapter, drawn)

    serve()
