"""SGLang's radix cache fits the harness, which finds what docs/found.md says of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import CacheSpec, Divergence, conformance, settings
from pytest_roseinfer.targets import partial_import
from pytest_roseinfer.targets.sglang_radix import SglangAdapter, SlidingSglangAdapter, sglang
from tests.others.fetch import FOLDER
from tests.others.found_scripts import beginning_about, scripts_about

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

THERE = FOLDER / "sglang"
PROJECT = "SGLang 0.5.23"
SCRIPTS = scripts_about(PROJECT)

# What it imports warns of this and that.
pytestmark = pytest.mark.filterwarnings("ignore")
needs_it = pytest.mark.skipif(
    not THERE.exists(), reason="SGLang is not there: python -m tests.others.fetch sglang"
)


@pytest.fixture(autouse=True)
def path_to_it(searching: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    settings.set_current(replace(settings.current(), examples=150))
    monkeypatch.syspath_prepend(THERE)


class EntersAtOnce(SglangAdapter):
    """What is decoded is in the tree when it is stored, so that all of it must be found."""

    prefixes = SglangAdapter.prefixes.but(finds="all")

    def kind(self, spec: CacheSpec) -> dict[str, Any]:
        return {**super().kind(spec), "eviction_policy": "slru"}

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        for request in (self.requests[seq] for seq in seqs):
            request.refresh_fill_ids()
            self.tree.checkpoint(request, up_to=request.kv.kv_committed_len)


class ForgetsWindowsEarly(SlidingSglangAdapter):
    """A page of a window is given back while the next token still sees it."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for request in (self.requests[seq] for seq in seqs if seq in self.requests):
            self.tree.evict_sliding_windows(request, request.kv.kv_committed_len + 1)
        super().append(seqs, key, value)


class Reasons(SglangAdapter):
    """All that is decoded is reasoning, which is not kept."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        for request in (self.requests[seq] for seq in seqs):
            request.reasoning_tokens = len(request.output_ids)


@needs_it
@pytest.mark.parametrize("adapter", [SglangAdapter, EntersAtOnce, SlidingSglangAdapter])
def test_it_conforms(adapter: type[SglangAdapter]) -> None:
    tests = conformance(adapter)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    tests.test_every_option_ends_in_the_same_bits()


@needs_it
def test_a_window_that_is_forgotten_early_is_found() -> None:
    with pytest.raises(Divergence, match=r"tokens in a window have the slots \[0"):
        conformance(ForgetsWindowsEarly)().test_histories()


@needs_it
def test_reasoning_that_is_stripped_after_a_retraction_breaks_the_books() -> None:
    sglang()
    serving = import_module("sglang.srt.runtime_context").get_serving()
    found = "the free list names a block twice|AssertionError: req.kv.cache_protected_len"
    with serving.override(strip_thinking_cache=True), pytest.raises(Divergence, match=found):
        conformance(Reasons)().test_histories()


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Run all scripts of the page in one process, since to import SGLang takes seconds."""
    between = 'print("----")\n'
    text = beginning_about(PROJECT) + between.join(script for script, _ in SCRIPTS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        cwd=THERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("----\n")


@needs_it
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script_of_found_md_prints_what_it_says(number: int, printed: list[str]) -> None:
    assert printed[number] == SCRIPTS[number][1]


def test_where_it_is_missing_the_adapter_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setattr(partial_import, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"sglang is not installed: unpack its wheel"):
        SglangAdapter().make(CacheSpec())
