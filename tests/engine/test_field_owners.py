"""Ownership of request fields: one file changes each field, and one place releases slots."""

from __future__ import annotations

import ast
from dataclasses import fields

from roseinfer.engine.request import Request
from tests.python_process import ROOT

OWNERS = {
    "drafts": "in_flight speculation",
    "ended_at": "engine",
    "error": "engine",
    "finish_reason": "engine",
    "first_token_at": "engine",
    "held_prefix": "request",
    "max_total_length": "request",
    "min_available_blocks": "scheduler",
    "num_cached_tokens": "request",
    "num_in_flight": "in_flight",
    "resident": "runner",
    "started_at": "engine",
    "times_preempted": "scheduler",
    "times_skipped": "scheduler",
}
"""The file of roseinfer that changes each field; other fields are never assigned.

Drafts have two: one proposes them, and the other takes them when they are verified or dropped.
"""


def test_each_request_field_is_changed_by_one_file() -> None:
    names = {field.name for field in fields(Request)}
    writers: dict[str, set[str]] = {}
    for path in (ROOT / "roseinfer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
                targets = [node.target]
            else:
                continue
            for target in (each for one in targets for each in ast.walk(one)):
                if not isinstance(target, ast.Attribute) or not isinstance(target.ctx, ast.Store):
                    continue
                if target.attr in names:
                    owner = target.value.attr if isinstance(target.value, ast.Attribute) else ""
                    is_request = isinstance(target.value, ast.Subscript) or getattr(
                        target.value, "id", owner
                    ) in ("request", "other")
                    if is_request or (path.stem, target.attr) == ("request", "max_total_length"):
                        writers.setdefault(target.attr, set()).add(path.stem)
    assert writers == {name: {*files.split()} for name, files in OWNERS.items()}


def test_slots_are_released_in_one_place() -> None:
    places = [
        (path.name, node.lineno)
        for room in ("engine", "decode")
        for path in (ROOT / "roseinfer" / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "remove_sequence"
    ]
    assert [name for name, _ in places] == ["runner.py"]
