"""Errors of requests, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from jaxgpt.errors import UserError


class RequestError(UserError):
    """A request that is refused, or that cannot be finished."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        wait: int | None = None,
    ):
        """Name the reason.

        message: what was got, and what is needed. status: of HTTP. param: the parameter at fault. code: a word for
        programs. wait: seconds after which the client may try again.
        """
        super().__init__(message)
        self.status, self.param, self.code, self.wait = status, param, code, wait

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the response."""
        headers = {} if self.wait is None else {"retry-after": str(self.wait)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})
