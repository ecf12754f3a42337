"""Errors in OpenAI's format, and the mapping from exceptions to them."""

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


RETRY_AFTER_HEADERS = {"Retry-After": "1"}
"""Headers of an error that may be temporary."""


class ApiError(Exception):
    """Error response of a request: status, message, parameter and code."""

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


def to_api_error(error: Exception) -> ApiError:
    """Return the API error for an exception; that of an unexpected one has no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, (BadArgument, ConfigError)):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, EngineRestarting):
        headers = {"Retry-After": str(error.retry_after)}
        return ApiError(503, str(error), code="engine_restarting", headers=headers)
    if isinstance(error, TooBusy):
        return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"})
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), code="engine_stopped")
    if isinstance(error, RoseinferError):
        return ApiError(500, str(error), code="generation_failed")
    return ApiError(500, "internal server error; the server's log has the traceback")
