"""Messages between the examiner and a program: length-prefixed JSON on a socket, untrusted and data only.

A value arrives as an equal value of a built-in type, so no method of a program's classes runs in the examiner. An
instance of a subclass becomes one of its base class. An object of any other type becomes a :class:`Foreign`, which is
equal to nothing.
"""

from __future__ import annotations

import json
import numbers
import socket
import struct
from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

#: Largest message that is read. HumanEval's own answers are below 1 KiB.
MAX_MESSAGE_BYTES = 16 << 20
_MAX_ITEMS = 1_000_000
#: Larger integers are written in base 16: Python refuses to read long ones in base 10.
_MAX_PLAIN_INT = 1 << 62
_LENGTH = struct.Struct("!I")


class Foreign:
    """An object of a type that is not built in; it can be iterated if the program's object could."""

    def __init__(self, type_name: str, items: list[Any] | None) -> None:
        self._type_name, self._items = type_name, items

    def __iter__(self) -> Iterator[Any]:
        if self._items is None:
            raise TypeError(f"{self._type_name!r} object is not iterable")
        return iter(self._items)

    def __len__(self) -> int:
        if self._items is None:
            raise TypeError(f"object of type {self._type_name!r} has no len()")
        return len(self._items)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{self._type_name} object>"


def send(connection: socket.socket, message: list[Any]) -> None:
    """Send a message of JSON values."""
    data = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> list[Any]:
    """Receive a message; EOFError if the connection was closed, ValueError if it is malformed or too long."""
    (size,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes, more than {MAX_MESSAGE_BYTES}")
    message = json.loads(_read(connection, size))
    if not isinstance(message, list) or not message:
        raise ValueError("a message is not a list")
    return message


def encode(value: Any) -> Any:
    """Return a value as JSON: None, bool, str and float as they are, others as a list that begins with their kind."""
    if value is None or type(value) in (bool, str, float):
        return value  # the most frequent types
    if isinstance(value, numbers.Number) or _is_numpy_bool(value):
        return _encode_number(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", *([encode(k), encode(v)] for k, v in dict.items(value))]
    if isinstance(value, range):
        return ["range", *map(encode, (value.start, value.stop, value.step))]
    for kind, base in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, base):
            return [kind, *map(encode, value)]
    items = [encode(item) for item in islice(value, _MAX_ITEMS)] if isinstance(value, Iterable) else None
    return ["iterator" if isinstance(value, Iterator) else "foreign", type(value).__name__, items]


def decode(data: Any) -> Any:
    """Return the value that :func:`encode` was given, with a built-in type.

    The data is not trusted: any ValueError, TypeError or LookupError means that it is not from :func:`encode`.
    """
    if not isinstance(data, list):
        return data
    kind, rest = data[0], data[1:]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](map(decode, rest))
    if kind == "dict":
        return {decode(key): decode(value) for key, value in rest}
    if kind in ("iterator", "foreign"):
        items = None if rest[1] is None else [decode(item) for item in rest[1]]
        return iter(items or []) if kind == "iterator" else Foreign(str(rest[0]), items)
    return _SCALARS[kind](*rest)


_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_SCALARS: dict[str, Any] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "complex": complex,
    "decimal": Decimal,
    "fraction": lambda top, bottom: Fraction(int(top, 16), int(bottom, 16)),
    "range": lambda *bounds: range(*map(decode, bounds)),
}


def _encode_number(value: Any) -> Any:
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, numbers.Integral) or _is_numpy_bool(value):
        whole = int(value)
        return whole if -_MAX_PLAIN_INT < whole < _MAX_PLAIN_INT else ["int", hex(whole)]
    if isinstance(value, numbers.Rational):
        return ["fraction", hex(value.numerator), hex(value.denominator)]
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Decimal):
        return ["decimal", str(value)]
    number = complex(value)
    return ["complex", number.real, number.imag]


def _is_numpy_bool(value: Any) -> bool:
    """Return whether a value is NumPy's bool, which is not a Number but equals 0 or 1; `is True` is false for it."""
    # A class that `type()` made has no module if the program's namespace has no name.
    module = getattr(type(value), "__module__", None)
    return module == "numpy" and type(value).__name__ in ("bool", "bool_")


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
