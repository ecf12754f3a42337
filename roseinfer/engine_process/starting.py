"""Starts the engine that a command serves, in a process of its own where that can be."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from roseinfer.cli.model_options import load_llm
from roseinfer.config import Launched
from roseinfer.engine_process.other_process import running

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from roseinfer.engine_process.any_process import ServedEngine


@contextmanager
def served_engine(args: argparse.Namespace, command: str) -> Iterator[ServedEngine]:
    """Yield an engine with the model of the options. ``command`` says what is done meanwhile.

    It has its own process, so that it shares no interpreter with what reads and sends. Under
    ``torchrun`` it stays in this one, which is the rank that leads.
    """
    if Launched.from_env() is None and os.name == "posix":
        with running(args, command) as engine:
            yield engine
    else:
        llm = load_llm(args, command)
        from roseinfer.engine_process.this_process import InProcess

        yield InProcess(llm)
