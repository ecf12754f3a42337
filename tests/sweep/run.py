"""Checks of subjects, each in a process of its own, so that they do not affect each other."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections import deque
from dataclasses import asdict
from select import select
from typing import TYPE_CHECKING

import huggingface_hub.constants
import torch
import transformers

from tests.mutants.forking import Child
from tests.sweep.check import check
from tests.sweep.outcome import Kind, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.sweep.subject import Subject


def run(
    subjects: Sequence[Subject], *, processes: int, seconds: int
) -> Iterator[tuple[Subject, Outcome]]:
    """Yield each subject with its outcome, as they end; each has a time limit in seconds."""
    torch.set_num_threads(1)  # a fork would wait for further threads
    waiting = deque(subjects)
    running: dict[Child, Subject] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            subject = waiting.popleft()
            running[_start(subject, seconds)] = subject
        ready: list[Child] = select([*running], [], [])[0]
        for child in ready:
            yield running.pop(child), _outcome(child, seconds)


def _start(subject: Subject, seconds: int) -> Child:
    def work() -> str:
        signal.alarm(seconds)  # ends the process in any state
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity(transformers.logging.CRITICAL)
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return json.dumps(asdict(check(subject)))

    return Child(work, watch=os.getpid())


def _outcome(child: Child, seconds: int) -> Outcome:
    try:
        ended = child.ended()
    except RuntimeError as error:
        return Outcome(Kind.WRONG, f"the check itself failed: {error}")
    if ended.ended_by == "SIGALRM":
        return Outcome(Kind.WRONG, f"timed out after {seconds} s")
    if ended.ended_by:
        return Outcome(Kind.WRONG, f"it crashed: {ended.ended_by}")
    answer = json.loads(ended.answer)
    return Outcome(**answer | {"kind": Kind(answer["kind"])})
