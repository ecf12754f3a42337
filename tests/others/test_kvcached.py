"""kvcached's block manager, and its documented finding."""

from __future__ import annotations

import pytest

from pytest_roseinfer import Divergence, conformance, settings
from tests.fresh_run import fresh_run
from tests.others.kvcached_blocks import BlocksAcrossPages, KvcachedAdapter
from tests.others.needs import needs

PROJECT = "kvcached"

pytestmark = needs(PROJECT)


def test_blocks_that_divide_a_page_conform() -> None:
    with fresh_run(settings.Settings(examples=200, steps=20, seed=1)):
        conformance(KvcachedAdapter)().test_histories()


def test_search_finds_the_documented_finding() -> None:
    message = "the cache counts 5 free blocks, and has 4"
    with (
        fresh_run(settings.Settings(examples=30, steps=20, seed=1)),
        pytest.raises(Divergence, match=message),
    ):
        conformance(BlocksAcrossPages)().test_histories()
