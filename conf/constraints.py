"""Bounds (``Range``) and choices (``Literal``, ``Registry``) of single fields, as parts of their types; their check.

Rules across fields are in ``conf.validate``.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Literal

from hlatctl.run.errors import ConfigError
from hlatctl.run.registry import Registry

#: The largest signed 64-bit number; torch, NumPy, Arrow and SQLite support no larger one.
_MAX_INT = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number, for ``Annotated``: greater than, at least, less than, at most."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    def __str__(self) -> str:
        bounds = {"greater than": self.gt, "at least": self.ge, "below": self.lt, "at most": self.le}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)


PositiveInt = Annotated[int, Range(gt=0)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeInt = Annotated[int, Range(ge=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]
#: A share below 1.
Fraction = Annotated[float, Range(ge=0, lt=1)]
#: A positive share of a peak.
Efficiency = Annotated[float, Range(gt=0, le=1)]
Port = Annotated[int, Range(ge=1, le=65535)]

#: The types of a dataclass's fields by name, with their ``Range``.
field_types: Callable[[Any], dict[str, Any]] = functools.cache(
    functools.partial(typing.get_type_hints, include_extras=True)
)


def violations(settings: Any, prefix: str = "") -> Iterator[ConfigError]:
    """Yield an error for every value that is outside its field's bounds or choices, at any depth.

    Args:
        settings: an instance of a dataclass of ``conf.schema``.
        prefix: beginning of its keys in errors, such as ``"sweep."``.
    """
    for name, expected in field_types(type(settings)).items():
        for error in _check(f"{prefix}{name}", value := getattr(settings, name), expected):
            default = getattr(type(settings), name, None)  # a field's plain default is an attribute of its class
            if default is not None and not isinstance(value, list | dict):
                error.hint = error.hint or f"the default is {prefix}{name}={default}"
            yield error


def _check(key: str, value: Any, expected: Any) -> Iterator[ConfigError]:
    if expected is Any:
        return
    if is_dataclass(value):
        yield from violations(value, f"{key}.")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _check(f"{key}[{index}]", item, typing.get_args(expected)[0])
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _check(f"{key}.{name}", item, typing.get_args(expected)[1])
    elif value is not None:
        kind: Any = type(value)
        yield from _check_scalar(key, value, *_rules(expected, kind))


def _check_scalar(
    key: str, value: Any, bounds: Range | None, choices: tuple[str, ...] | Registry[Any]
) -> Iterator[ConfigError]:
    if choices and value not in choices:
        yield ConfigError(f"{key}={value}: not known", hint=f"use one of: {', '.join(choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        yield ConfigError(f"{key}={value}: must be a finite number")
    elif bounds and value not in bounds:
        yield ConfigError(f"{key}={value}: must be {bounds}")
    elif type(value) is int and value > _MAX_INT and not (bounds and bounds.le):
        yield ConfigError(f"{key}={value}: must be at most {_MAX_INT} (2^63 - 1)")


def plain_type(expected: Any) -> Any:
    """Return the type of a field's values: ``int`` for a bounded number, ``str`` for choices."""
    if typing.get_origin(expected) is Literal:
        return str
    return expected.__origin__ if typing.get_origin(expected) is Annotated else expected


@functools.cache
def _rules(expected: Any, kind: Any) -> tuple[Range | None, tuple[str, ...] | Registry[Any]]:
    """Return a type's bounds and choices; for a union, those of the member of this kind, or of the first member."""
    if typing.get_origin(expected) is Literal:
        return None, typing.get_args(expected)
    if typing.get_origin(expected) is Annotated:
        rule = expected.__metadata__[0]
        return (None, rule) if isinstance(rule, Registry) else (rule, ())
    members = typing.get_args(expected)
    if not members:
        return None, ()
    return _rules(next((one for one in members if plain_type(one) is kind), members[0]), kind)
