"""Pictures of docs/findings are those that the harness draws."""

from __future__ import annotations

import re

import pytest

from tests.others.found_scripts import PAGES
from tests.others.picture import Picture, file_of
from tests.others.pictures import PICTURES
from tests.others.written_pictures import WRITTEN

pytestmark = pytest.mark.usefixtures("seeded_search")


@pytest.mark.parametrize("name", PICTURES)
def test_picture_equals_the_drawing_of_its_failure(name: str) -> None:
    """Else: ``python -m tests.others``."""
    picture: Picture = PICTURES[name]
    if not picture.can_be_drawn():
        pytest.skip(f"{picture.project} is not fetched: python -m tests.others.fetch")
    assert picture.draw() == file_of(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", WRITTEN)
def test_written_example_passes_with_one_change(name: str) -> None:
    picture: Picture = WRITTEN[name]
    if not picture.can_be_drawn():
        pytest.skip(f"{picture.project} is not fetched: python -m tests.others.fetch")
    picture.run_passing()


def test_pages_show_every_picture() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    names = [file_of(name).name for name in PICTURES]
    assert sorted(re.findall(r"!\[[^]]+\]\(([\w-]+\.svg)\)", pages)) == sorted(names)
    assert sorted(file.name for file in PAGES.glob("*.svg")) == sorted(names)
