"""Refusals in the shape of OpenAI's API: a status, and {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

_NAMES_SHOWN = 20
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A refused request.

    Args:
        status: the HTTP status, 4xx or 503.
        code: a machine-readable code, such as "queue_full".
        message: one line for people: what was expected, what came.
        param: name of the field that is wrong.
        retry_seconds: seconds after which the client may try again.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_seconds: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self._retry_seconds = retry_seconds
        self.headers = {} if retry_seconds is None else {"Retry-After": str(retry_seconds)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def __reduce__(self) -> tuple[Any, ...]:
        """See pickle, which would give the message alone to the class."""
        named = {"param": self.param, "retry_seconds": self._retry_seconds}
        return partial(ApiError, self.status, self.code, self.message, **named), ()

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        return error_body(self.status, self.code, self.message, self.param)


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error in OpenAI's format."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": " ".join(message.split()), "type": kind, "param": param, "code": code}}


def model_not_found(names: Sequence[str]) -> ApiError:
    """A 404 for a model that is none of those served."""
    expected = f"one of {', '.join(names)}, the models that are" if len(names) > 1 else f"{names[0]}, the model that is"
    return ApiError(404, "model_not_found", f"expected {expected} served", param="model")


def not_found(what: str, known: Iterable[str] = ()) -> ApiError:
    """A 404 for an unknown id; the message does not repeat the id, but names those that everyone may know."""
    names = list(islice(known, _NAMES_SHOWN + 1))
    if names:
        more = ", ..." if len(names) > _NAMES_SHOWN else ""
        return ApiError(404, f"{what}_not_found", f"{what}: expected one of {', '.join(names[:_NAMES_SHOWN])}{more}")
    return ApiError(404, f"{what}_not_found", f"expected the id of an existing {what}, got another or an expired one")
