"""The page at ``/``: one types a prompt, and watches tokens come and the cache fill."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.responses import HTMLResponse, Response

if TYPE_CHECKING:
    from starlette.requests import Request

    from roseinfer.server.service import Service

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@cache
def _source() -> str:
    return files("roseinfer.server").joinpath("page.html").read_text(encoding="utf-8")


async def page(service: Service, _: Request) -> Response:
    known = {
        "model": service.names[0],
        "chat": service.prompts.can_chat,
        "key": service.config.api_key is not None,
    }
    said = json.dumps(known).replace("<", "\\u003c")
    return HTMLResponse(_source().replace("{{server}}", said), headers=_HEADERS)
