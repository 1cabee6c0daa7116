"""Dataclasses as JSON values and back, with the types of their fields checked."""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def from_plain(kind: type[T], value: Any) -> T:
    """Return a dataclass from the JSON value of ``dataclasses.asdict``.

    Raises:
        TypeError: a value has another type than its field, or a field is missing or unknown.
    """
    found: T = _of(kind, value)
    return found


def _of(kind: Any, value: Any) -> Any:
    origin: Any = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None or type(value) in parts:
            return value
        return _of(next(part for part in parts if part is not type(None)), value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints: dict[str, Any] = _hints(kind)
        if not isinstance(value, dict) or set(value) != set(hints):
            raise TypeError(f"{kind}: {value!r:.80}")
        return kind(**{name: _of(hints[name], item) for name, item in value.items()})
    if kind not in _JSON and isinstance(kind, type) and isinstance(value, kind):
        return value  # it was made by the caller
    if type(value) not in _JSON[origin or kind]:
        raise TypeError(f"{kind}: {value!r:.80}")
    return _collection(origin, parts, value) if origin else value


def _collection(origin: Any, parts: tuple[Any, ...], value: Any) -> Any:
    if origin is list:
        return [_of(parts[0], item) for item in value]
    if origin is tuple:
        return tuple(_of(part, item) for part, item in zip(parts, value, strict=True))
    # JSON's keys are text.
    return {(int(key) if parts[0] is int else key): _of(parts[1], item) for key, item in value.items()}


#: The JSON types of a field's type.
_JSON: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (float, int),
    list: (list,),
    tuple: (list,),
    dict: (dict,),
}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
