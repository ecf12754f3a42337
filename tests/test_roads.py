"""The roads of a key and a value: through how few files a call comes to where they are stored."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from roseinfer import LLM, SamplingParams
from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Place = tuple[str, str]

STORE = ("kv/storage.py", "write_vector")
STORE_ONE = ("kv/storage.py", "write_scalar")
RESIDENT_STORE = ("attention/reference.py", "append_and_attend_reference")
STEP = ("llm.py", "_step")

MOST_FROM_A_PROMPT = 14
MOST_FROM_A_STEP = {False: 10, True: 12}
"""By whether the sequences are resident."""


def road(call: Callable[[], object], begin: Place, times: int, end: Place) -> list[str]:
    """The files of roseinfer entered between the ``times``-th call of ``begin`` and ``end``."""
    package = ROOT / "roseinfer"
    entered: list[str] = []
    left = times
    arrived = False

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal left, arrived
        if event != "call" or arrived or not frame.f_code.co_filename.startswith(f"{package}/"):
            return
        file = frame.f_code.co_filename.removeprefix(f"{package}/")
        place = (file, frame.f_code.co_name)
        left -= place == begin
        if left > 0:
            return
        if file not in entered:
            entered.append(file)
        arrived = place == end

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert arrived
    return entered


def generating(resident: bool) -> Callable[[], object]:
    """A call that finds all that is made once made already."""
    llm = LLM("tiny", device="cpu", resident_decode=resident, kv_cache_tokens=1000)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    llm.generate(["warm up"], params, progress=False)
    return lambda: llm.generate(["hello there"], params, progress=False)


@pytest.mark.parametrize("resident", [False, True])
def test_from_a_prompt_to_its_stored_keys(resident: bool) -> None:
    files = road(generating(resident), ("llm.py", "generate"), 1, STORE)
    assert len(files) <= MOST_FROM_A_PROMPT, files


@pytest.mark.parametrize(("resident", "end"), [(False, STORE_ONE), (True, RESIDENT_STORE)])
def test_from_a_step_to_the_stored_token(resident: bool, end: Place) -> None:
    files = road(generating(resident), STEP, 3, end)
    assert len(files) <= MOST_FROM_A_STEP[resident], files
