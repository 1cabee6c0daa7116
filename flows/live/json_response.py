"""JSON responses for the page."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def as_json(value: Any, status: int = 200) -> Response:
    """Return a JSON response; see :func:`to_json`."""
    return Response(to_json(value), status, media_type="application/json")


def to_json(value: Any) -> bytes:
    """Return a value as JSON. Numbers that are not finite become null.

    In text that is not Unicode, such as a folder's name, bad characters become question marks, so that one such name
    doesn't hide all runs.
    """
    try:
        return orjson.dumps(value, default=_plain, option=_OPTIONS)
    except orjson.JSONEncodeError:
        return orjson.dumps(_encodable(value), default=_plain, option=_OPTIONS)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _encodable(value: Any) -> Any:
    """Return a value without what ``orjson`` refuses: lone surrogates, and integers of more than 64 bits."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(each) for each in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return str(value)
    return value
