"""Keeps the bodies that schemathesis makes within what no schema can say: how long texts become."""

from __future__ import annotations

import json
from typing import Any

import schemathesis

LONGEST = 500
"""Characters of a body. What the template adds to each message counts too."""


def filter_body(_: Any, body: Any) -> bool:
    return len(json.dumps(body, default=str, ensure_ascii=False).encode(errors="replace")) < LONGEST


schemathesis.hook(filter_body)
