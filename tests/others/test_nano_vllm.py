"""nano-vllm's block manager: conformance, and the findings of docs/findings."""

from __future__ import annotations

import sys

import pytest

from pytest_roseinfer import CacheSpec, Divergence, conformance
from pytest_roseinfer.targets import partial_import
from pytest_roseinfer.targets.nano_vllm import NanoVllmAdapter
from tests.others.fetch import FOLDER
from tests.others.pictures import FindsSomeAndCollides

SOURCES = FOLDER / "nano-vllm"

needs_nano_vllm = pytest.mark.skipif(
    not SOURCES.exists(),
    reason="nano-vllm is not downloaded: python -m tests.others.fetch nano-vllm",
)


@pytest.fixture(autouse=True)
def import_path(seeded_search: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.syspath_prepend(SOURCES)


class FindsSome(NanoVllmAdapter):
    """Declares that lookups may miss stored prefixes, which is a known finding."""

    prefixes = NanoVllmAdapter.prefixes.but(finds="some")


@needs_nano_vllm
def test_block_manager_conforms_apart_from_missed_prefixes() -> None:
    tests = conformance(FindsSome)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()


@needs_nano_vllm
def test_lookup_misses_a_stored_prefix() -> None:
    with pytest.raises(
        Divergence, match=r"match_prefix\(\) of text .* found .*, though .* are stored"
    ):
        conformance(NanoVllmAdapter)().test_histories()


@needs_nano_vllm
def test_weak_hash_matches_blocks_after_different_prefixes() -> None:
    with pytest.raises(Divergence, match=r"found text \d+, token|only \d+ of them may be found"):
        conformance(FindsSomeAndCollides)().test_histories()


def test_missing_package_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "nanovllm", raising=False)
    monkeypatch.setattr(partial_import, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"nanovllm is not installed: clone .*nano-vllm"):
        NanoVllmAdapter().make(CacheSpec())
