"""nano-vllm's block manager fits the harness, which finds what docs/found.md says of it."""

from __future__ import annotations

import os
import sys

import pytest

from pytest_roseinfer import CacheSpec, Divergence, conformance
from pytest_roseinfer.targets import partial_import
from pytest_roseinfer.targets.nano_vllm import NanoVllmAdapter, WeaklyHashedNanoVllmAdapter
from tests import warm_process
from tests.others.fetch import FOLDER
from tests.others.found_scripts import scripts_about

THERE = FOLDER / "nano-vllm"
SCRIPTS = scripts_about("nano-vllm 0.2.0")

needs_it = pytest.mark.skipif(
    not THERE.exists(), reason="nano-vllm is not there: python -m tests.others.fetch nano-vllm"
)


@pytest.fixture(autouse=True)
def path_to_it(searching: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.syspath_prepend(THERE)


class MissesSome(NanoVllmAdapter):
    """That it forgets a text which stays is no finding."""

    prefixes = NanoVllmAdapter.prefixes.but(finds="some")


class MissesSomeAndCollides(WeaklyHashedNanoVllmAdapter):
    prefixes = WeaklyHashedNanoVllmAdapter.prefixes.but(finds="some")


@needs_it
def test_it_conforms_but_for_what_it_does_not_find() -> None:
    tests = conformance(MissesSome)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()


@needs_it
def test_a_text_that_stays_is_not_found_any_more() -> None:
    with pytest.raises(
        Divergence, match=r"match_prefix\(\) of text .* found .*, though .* are stored"
    ):
        conformance(NanoVllmAdapter)().test_histories()


@needs_it
def test_equal_tokens_behind_other_ones_are_taken_for_a_hit() -> None:
    with pytest.raises(Divergence, match=r"found text \d+, token|only \d+ of them may be found"):
        conformance(MissesSomeAndCollides)().test_histories()


@needs_it
@pytest.mark.parametrize(("script", "printed"), SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_script_of_found_md_prints_what_it_says(script: str, printed: str) -> None:
    done = warm_process.run(["-c", script], cwd=THERE, environment=os.environ, timeout=60)
    assert done.stdout == printed, done.stderr


def test_where_it_is_missing_the_adapter_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "nanovllm", raising=False)
    monkeypatch.setattr(partial_import, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"nanovllm is not installed: clone .*nano-vllm"):
        NanoVllmAdapter().make(CacheSpec())
