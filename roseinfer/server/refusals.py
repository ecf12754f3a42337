"""Errors in OpenAI's shape, and which of them an exception means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from roseinfer.errors import (
    BadArgument,
    ConfigError,
    EngineRestarting,
    EngineStopped,
    RoseinferError,
    TooBusy,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


LATER = {"Retry-After": "1"}
"""Headers of a refusal that need not last."""


class Refused(Exception):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def refusal_of(error: Exception) -> Refused:
    """Return what a client is told of an error. One that nobody raised on purpose is not told."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):
        return Refused(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, (BadArgument, ConfigError)):
        return Refused(400, str(error), code="invalid_value")
    if isinstance(error, EngineRestarting):
        later = {"Retry-After": str(error.retry_after)}
        return Refused(503, str(error), code="engine_restarting", headers=later)
    if isinstance(error, TooBusy):
        return Refused(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"})
    if isinstance(error, EngineStopped):
        return Refused(503, str(error), code="engine_stopped")
    if isinstance(error, RoseinferError):
        return Refused(500, str(error), code="generation_failed")
    return Refused(500, "the server failed at this request; its log says where")
