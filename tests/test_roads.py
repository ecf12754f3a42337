"""Call paths of a key and a value: the number of files entered before they are stored."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from roseinfer import LLM, SamplingParams
from tests.python_process import ROOT
from tests.server.served import running

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Place = tuple[str, str]

PACKAGE = f"{ROOT / 'roseinfer'}/"
STORE = ("kv/storage.py", "write_vector")
STORE_ONE = ("kv/storage.py", "write_scalar")
RESIDENT_STORE = ("attention/reference.py", "append_and_attend_reference")
STEP = ("llm.py", "_step")

MAX_FILES_OF_PROMPT = 14
MAX_FILES_OF_STEP = {False: 10, True: 11}
"""Most files, by whether sequences are resident."""
MAX_FILES_OF_BODY = 20
CONNECTION_FILES = {"server/connections.py", "server/http_server.py"}
"""Files that serve connections, at the same time as the engine gets a body."""


@dataclass(slots=True)
class FileRecorder:
    """Profile function that lists the files of roseinfer entered from one call to another."""

    begin: Place
    end: Place
    remaining: int = 1
    """Calls of ``begin`` until the list begins."""
    armed: bool = True
    """False to ignore all calls for now."""
    entered: list[str] = field(default_factory=list)
    arrived: bool = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not self.armed or self.arrived or not file.startswith(PACKAGE):
            return
        place = (file.removeprefix(PACKAGE), frame.f_code.co_name)
        self.remaining -= place == self.begin
        if self.remaining > 0:
            return
        if place[0] not in self.entered:
            self.entered.append(place[0])
        self.arrived = place == self.end


def files_entered(call: Callable[[], object], begin: Place, times: int, end: Place) -> list[str]:
    """Return the files entered between the ``times``-th call of ``begin`` and ``end``."""
    recorder = FileRecorder(begin, end, times)
    before = sys.getprofile()
    sys.setprofile(recorder)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert recorder.arrived
    return recorder.entered


def warm_generate(resident: bool) -> Callable[[], object]:
    """Return a call to ``generate`` of an engine that is warmed up."""
    llm = LLM("tiny", device="cpu", resident_decode=resident, kv_cache_tokens=1000)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    llm.generate(["warm up"], params, progress=False)
    return lambda: llm.generate(["hello there"], params, progress=False)


@pytest.mark.parametrize("resident", [False, True])
def test_prompt_reaches_its_stored_keys_through_few_files(resident: bool) -> None:
    files = files_entered(warm_generate(resident), ("llm.py", "generate"), 1, STORE)
    assert len(files) <= MAX_FILES_OF_PROMPT, files


@pytest.mark.parametrize(("resident", "end"), [(False, STORE_ONE), (True, RESIDENT_STORE)])
def test_step_reaches_its_stored_token_through_few_files(resident: bool, end: Place) -> None:
    files = files_entered(warm_generate(resident), STEP, 3, end)
    assert len(files) <= MAX_FILES_OF_STEP[resident], files


def test_http_body_reaches_the_engine_through_few_files() -> None:
    """The first request makes what is made once; others may run while a thread ends its work."""
    counts: list[int] = []
    for _ in range(3):
        if counts and min(counts) <= MAX_FILES_OF_BODY:
            break
        counts.append(len(files_of_a_body()))
    assert min(counts) <= MAX_FILES_OF_BODY, counts


def files_of_a_body() -> list[str]:
    """Return the files that the second request to a new server enters before the engine."""
    body = ("server/app.py", "_read_json_body")
    recorder = FileRecorder(body, ("engine/engine.py", "submit"), armed=False)
    threading.setprofile(recorder)
    try:
        with running() as server:
            for _ in range(2):
                assert server.post("completions", prompt="hello", max_tokens=2).status == 200
                recorder.armed = True
    finally:
        threading.setprofile(None)
    assert recorder.arrived
    return [file for file in recorder.entered if file not in CONNECTION_FILES]
