"""Values between the examiner and a program: length-prefixed JSON on a socket, data only, read without trust.

A value arrives as an equal one of a built-in type, so no method of a program's own classes ever runs in the examiner.
Subclasses become their base. An object of any other type becomes :class:`Foreign`: its items if it has any, equal to
nothing.
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
#: Whole numbers beyond this are written in base 16: Python refuses to read long ones in base 10.
_MAX_PLAIN_INT = 1 << 62
_LENGTH = struct.Struct("!I")


class Foreign:
    """An object whose type the examiner does not know: it can be iterated over if the program's could."""

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
    """Write one message; what it holds is JSON already."""
    data = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> list[Any]:
    """Read one message.

    Raises:
        EOFError: the other side is gone.
        ValueError: it is no message, or too long.
    """
    (size,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes, more than {MAX_MESSAGE_BYTES}")
    message = json.loads(_read(connection, size))
    if not isinstance(message, list) or not message:
        raise ValueError("no message")
    return message


def encode(value: Any) -> Any:
    """A value as JSON: plain ones as they are, all others as a list that begins with their kind."""
    if value is None or type(value) in (bool, str, float):
        return value  # most are one of these
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
    """The value that :func:`encode` was given, or its likeness.

    Raises:
        ValueError, TypeError, LookupError: it is none.
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
    """NumPy's truth values are no numbers, yet equal 0 and 1; `is True` is false for them, as it is for 1."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
