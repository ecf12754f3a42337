"""transformers' ``generate`` and hybrid caches: conformance, and the findings of docs/findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import transformers

from pytest_roseinfer import Divergence, MixDivergence, conformance
from tests.others import generate_engine
from tests.others.engine_search import verdicts_of
from tests.others.found_scripts import preamble_about, scripts_about
from tests.others.hybrid_cache import HybridCacheAdapter, SelectsHybridRows
from tests.python_process import run_python

if TYPE_CHECKING:
    from pytest_roseinfer import EngineAdapter

VERSION = "5.23.0"
"""The version that docs/findings is about."""
PROJECT = f"transformers {VERSION}: `generate`"
WRONG_TOKEN = r"request \d, token \d+: \d+; alone it gets \d+"

only_documented_version = pytest.mark.skipif(
    transformers.__version__ != VERSION,
    reason=f"docs/findings is about transformers {VERSION}",
)


@pytest.mark.slow
@only_documented_version
@pytest.mark.parametrize(
    "adapter",
    [
        generate_engine.GeneratesMiniMax,
        generate_engine.GeneratesJamba,
        generate_engine.GeneratesRecurrentGemma,
    ],
)
def test_search_finds_the_defect(adapter: type[EngineAdapter]) -> None:
    with pytest.raises(MixDivergence, match=WRONG_TOKEN):
        verdicts_of(adapter, examples=25)


@pytest.mark.slow
def test_generate_conforms_with_the_other_models() -> None:
    assert verdicts_of(generate_engine.GenerateEngine, examples=25) == ["equal"] * 2 + ["met"] * 2


@only_documented_version
def test_selecting_rows_leaves_the_states(seeded_search: None) -> None:  # noqa: ARG001
    with pytest.raises(Divergence, match=r"expected the state after all of its \d+ token"):
        conformance(SelectsHybridRows)().test_histories()


@pytest.mark.slow
def test_reordering_a_hybrid_cache_conforms(seeded_search: None) -> None:  # noqa: ARG001
    conformance(HybridCacheAdapter)().test_histories()


@pytest.mark.sampled_cases
@only_documented_version
@pytest.mark.parametrize(("script", "printed"), scripts_about(PROJECT))
def test_documented_script_prints_its_output(script: str, printed: str) -> None:
    assert run_python(preamble_about(PROJECT) + script, warm=True) == printed
