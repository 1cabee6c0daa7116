"""Every configuration key with its type, rule, default and meaning, from the schema's source."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from conf.constraints import Range, field_types
from conf.schema import Config, LadderConfig, SimulationConfig, SweepConfig
from hlatctl.run.errors import ConfigError, nearest
from hlatctl.run.registry import Registry

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything"}
_GLOB = set("*?[")


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key.

    Args:
        name: dotted; ``[]`` follows a list's name and ``NAME`` stands for an entry's name.
        accepts: type and rule, in words.
        default: the schema's default, before any option or experiment; None for a key without one or of a list's entry.
        meaning: one or two sentences.
        choices: its values, as far as they can be listed.
    """

    name: str
    accepts: str
    default: Any
    meaning: str
    choices: tuple[str, ...] = ()


def keys(pattern: str | None = None) -> list[Key]:
    """Return the keys of a run's configuration, and of ``simulation``, ``sweep`` and ``ladder``, in the schema's order.

    Args:
        pattern: a part of a key's name, or a shell pattern for the whole name; None returns all.

    Raises:
        ConfigError: no key matches.
    """
    known = _all()
    if pattern is None:
        return list(known)
    found = [key for key in known if _fits(key.name, pattern)]
    if not found:
        close = nearest(pattern, [key.name for key in known])
        hint = f"did you mean {close}?" if close else "`hlatctl config keys` lists all keys"
        raise ConfigError(f"{pattern}: no key has this in its name", hint=hint)
    return found


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) if _GLOB & set(pattern) else pattern in name


@functools.cache
def _all() -> tuple[Key, ...]:
    apart = {"simulation.": SimulationConfig, "sweep.": SweepConfig, "ladder.": LadderConfig}
    return (*_keys_of(Config, ""), *(key for prefix, cls in apart.items() for key in _keys_of(cls, prefix)))


def _keys_of(cls: type, prefix: str) -> Iterator[Key]:
    meanings = _meanings(cls.__module__)[cls.__name__]
    for field in dataclasses.fields(cls):
        expected, name = field_types(cls)[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(expected) and isinstance(expected, type):
            yield from _keys_of(expected, f"{name}.")
            continue
        yield Key(
            name=name,
            accepts=_accepts(expected),
            default=_default(field),
            meaning=meanings[field.name],
            choices=_choices(expected),
        )
        entry, place = _entry(expected)
        if entry:
            yield from _keys_of(entry, f"{name}{place}.")


def _entry(expected: Any) -> tuple[type | None, str]:
    """Return the dataclass of a list's or mapping's entries, and how a key writes its place."""
    inner = typing.get_args(expected)[-1:]
    if inner and dataclasses.is_dataclass(inner[0]) and isinstance(inner[0], type):
        return inner[0], "[]" if typing.get_origin(expected) is list else ".NAME"
    return None, ""


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _choices(expected: Any) -> tuple[str, ...]:
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin is Literal:
        return tuple(map(str, inner))
    if origin is Annotated and isinstance(inner[1], Registry):
        return tuple(inner[1])
    if origin in (types.UnionType, typing.Union):
        return tuple(choice for kind in inner for choice in _choices(kind))
    return {bool: ("true", "false"), types.NoneType: ("null",)}.get(expected, ())


def _accepts(expected: Any) -> str:
    """Return a type and its rule in words, such as ``whole number greater than 0``."""
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin is Annotated and isinstance(inner[1], Registry):
        return _either(inner[1])
    if origin is Annotated:
        rules = [str(rule) for rule in inner[1:] if isinstance(rule, Range)]
        return " ".join([_accepts(inner[0]), *rules])
    if origin is Literal:
        return _either(map(str, inner))
    if origin in (types.UnionType, typing.Union):
        choices = [kind for kind in inner if typing.get_origin(kind) is Literal]
        others = [_accepts(kind) for kind in inner if kind not in (*choices, types.NoneType)]
        nothing = ["null"] if types.NoneType in inner else []
        return _either([*(str(choice) for kind in choices for choice in typing.get_args(kind)), *others, *nothing])
    if origin is list:
        return f"list of {_plural(inner[0])}"
    if origin is dict:
        return f"mapping of names to {_plural(inner[1])}"
    if dataclasses.is_dataclass(expected):
        return "group of keys"
    return _WORDS[expected]


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _plural(expected: Any) -> str:
    words = _accepts(expected)
    for singular, plural in (("whole number", "whole numbers"), ("number", "numbers"), ("group of keys", "groups")):
        if words.startswith(singular):
            return plural + words.removeprefix(singular)
    return {"text": "texts", "anything": "any values"}.get(words, f"values: {words}")


@functools.cache
def _meanings(module: str) -> dict[str, dict[str, str]]:
    meanings: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            pairs = zip(node.body, node.body[1:], strict=False)
            meanings[node.name] = dict(entry for pair in pairs if (entry := _documented(*pair)))
    return meanings


def _documented(field: ast.stmt, text: ast.stmt) -> tuple[str, str] | None:
    if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)):
        return None
    value = text.value
    if not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
        return None
    return field.target.id, " ".join(value.value.split())
