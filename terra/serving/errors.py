"""Refusals in the shape of OpenAI's API: a status, and {"error": {"message", "type", "param", "code"}}."""

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: the HTTP status, 4xx or 503.
        code: a word for programs, such as "queue_full".
        message: one line for people: what was expected, what came.
        param: the field it concerns.
        retry_seconds: when to try again.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_seconds: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers = {} if retry_seconds is None else {"Retry-After": str(retry_seconds)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return error_body(self.status, self.code, self.message, self.param)


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": " ".join(message.split()), "type": kind, "param": param, "code": code}}


def not_found(what: str) -> ApiError:
    """Nothing has the id that was asked for; the id itself is not repeated."""
    return ApiError(404, f"{what}_not_found", f"expected the id of an existing {what}, got another or an expired one")
