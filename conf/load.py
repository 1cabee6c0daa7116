"""Conversion between YAML text and the typed configuration; strict, without Hydra.

The trainer and the evaluator need only this to read a run's ``config.yaml``.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
import types
import typing
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml

from conf.constraints import field_types, plain_type
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import ConfigError
from hlatctl.run.files import read_text, why

#: Both loaders are equally safe; libyaml's is ten times as fast.
SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_T = TypeVar("_T")
#: A configuration has a few hundred values. Hydra takes 3 s for as many as this.
_MAX_VALUES = 10_000
_MAX_DEPTH = 100
#: Python reads longer numbers in quadratic time; ``1:1:1:…`` is a number of base 60.
_MAX_DIGITS = 100
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
#: Types of values, in words.
KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
#: YAML's spelling of values that Python writes differently.
_YAML = {"None": "null", "True": "true", "False": "false"}
#: The largest seed that torch accepts.
_MAX_INT = 2**64 - 1
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200
_TOKEN_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def load(path: Path, *, read: Callable[[Path], str] = read_text) -> Config:
    """Read a resolved ``config.yaml``, as :func:`load_dataclass` does."""
    return load_dataclass(Config, path, read=read)


def load_dataclass(cls: type[_T], path: Path, *, read: Callable[[Path], str] = read_text) -> _T:
    """Read a dataclass from a file with the text of :func:`dump`, sealed or not.

    Args:
        read: returns the text of the file.

    Raises:
        ConfigError: the file is missing, damaged, incomplete, not YAML, or does not fit the dataclass.
    """
    try:
        text, _ = files.unseal_lines(read(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML ({why(error)})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", hint="if you have edited it, delete its last line") from None
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not readable as YAML ({why(error)})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: contains {type(value).__name__}, expected a mapping")
    try:
        decoded = decode_dataclass(cls, value, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from None
    if missing := sorted(set(flatten(cls())) - set(dotted_keys(value))):
        raise ConfigError(f"{path}: lacks {len(missing)} keys, the first: {missing[0]}")
    if not text.endswith("\n"):
        raise ConfigError(f"{path}: its last line is cut off")
    return decoded


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: it is not YAML, contains an invalid value or a key twice, is nested too deep, or has too many
            values. Each use of an alias counts as all of its values.
    """
    try:
        _check_written(text)
        loader: Any = SAFE_LOADER(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _measure(node, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, AttributeError, OverflowError) as error:  # AttributeError: an invalid `!!timestamp`
        raise ValueError(str(error)) from None


def _check_written(text: str) -> None:
    """Refuse a text before its values are built: libyaml's loader crashes the process at a depth of about 20,000."""
    values = depth = 0
    for event in yaml.parse(text, Loader=SAFE_LOADER):
        values += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError(f"is nested deeper than {_MAX_DEPTH} levels")
        if values > _MAX_VALUES:
            raise ValueError(f"has more than {_MAX_VALUES:,} values")


def _measure(node: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of values of a node and its height, with every alias written out.

    Args:
        node: of YAML.
        known: the results of the nodes that were measured; 0 while a node is being measured.

    Raises:
        ValueError: it has too many values, a number that is too long, a key twice, or contains itself.
    """
    if id(node) in known:
        if known[id(node)] == (0, 0):
            raise ValueError(f"contains an alias of a value that it is part of (line {node.start_mark.line + 1})")
        return known[id(node)]
    known[id(node)] = (0, 0)
    if isinstance(node, yaml.ScalarNode):
        if node.tag in _NUMBERS and len(node.value) > _MAX_DIGITS:
            raise ValueError(f"the number {node.value[:20]}… is out of range")
        parts = []
    else:
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    raise ValueError(f"has the key {key.value[:100]} twice (line {key.start_mark.line + 1})")
                keys.add((key.tag, key.value))
    values, height = 1, 1
    for part in parts:
        part_values, part_height = _measure(part, known)
        values, height = values + part_values, max(height, part_height + 1)
        if values > _MAX_VALUES:
            raise ValueError(f"has more than {_MAX_VALUES:,} values, each alias written out")
        if height > _MAX_DEPTH:
            raise ValueError(f"is nested deeper than {_MAX_DEPTH} levels, each alias written out")
    known[id(node)] = values, height
    return values, height


def dump(config: Any) -> str:
    """Return a configuration, or another dataclass, as YAML with all keys in the order of the schema."""
    text: str = yaml.dump(dataclasses.asdict(config), Dumper=_SafeDumper, sort_keys=False, allow_unicode=True)
    return text


def decode(value: dict[str, Any]) -> Config:
    """Build the typed configuration from plain values; every key must be known and every value must have its type.

    Raises:
        ConfigError: names the dotted key, the value and the expected type.
    """
    return decode_dataclass(Config, value, "")


def dotted_keys(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested mapping: ``{"model.vocab_size": 8192, ...}``."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat.update(dotted_keys(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def flatten(config: Any) -> dict[str, Any]:
    """Return the values of a configuration, or another dataclass, by dotted key."""
    return dotted_keys(dataclasses.asdict(config))


def decode_dataclass(cls: type[_T], value: dict[str, Any], prefix: str) -> _T:
    """Build any dataclass from plain values; errors put ``prefix`` before its keys.

    Raises:
        ConfigError: as :func:`decode`.
    """
    known = field_types(cls)
    unknown = sorted(map(str, set(value) - set(known)))
    if unknown:
        raise ConfigError(f"{prefix}{unknown[0]}: unknown key", hint=f"known here: {', '.join(known)}")
    return cls(**{name: _decode_value(known[name], item, prefix + name) for name, item in value.items()})


def _decode_value(expected: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        if not isinstance(value, dict):
            raise _type_error(key, value, "a group of keys")
        return decode_dataclass(expected, value, f"{key}.")
    if expected is Any:
        return value
    if typing.get_origin(expected) is Annotated:
        return _decode_value(expected.__origin__, value, key)
    if typing.get_origin(expected) is Literal:
        return _decode_value(str, value, key)
    if typing.get_origin(expected) in (types.UnionType, typing.Union):
        kinds = typing.get_args(expected)
        fitting = next((kind for kind in kinds if plain_type(kind) is type(value)), kinds[0])
        return value if value is None else _decode_value(fitting, value, key)
    if typing.get_origin(expected) is list:
        if not isinstance(value, list):
            raise _type_error(key, value, "a list")
        (item_type,) = typing.get_args(expected)
        return [_decode_value(item_type, item, f"{key}[{index}]") for index, item in enumerate(value)]
    if typing.get_origin(expected) is dict:
        if not isinstance(value, dict):
            raise _type_error(key, value, "a group of keys")
        _, item_type = typing.get_args(expected)
        return {str(name): _decode_value(item_type, item, f"{key}.{name}") for name, item in value.items()}
    if expected is int and isinstance(value, str) and re.sub(r"\[\d+\]$", "", key).endswith("tokens"):
        return token_count(value, key)
    if isinstance(value, int) and abs(value) > _MAX_INT:
        raise ConfigError(f"{key}={str(value)[:30]}…: is out of range, must be below 2^64")
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not expected:
        raise _type_error(key, value, KINDS.get(expected, expected.__name__))
    return value


def token_count(text: str, key: str) -> int:
    """Return a token count such as ``200B``, ``1.8T``, ``2.5M`` or ``1000`` as a number.

    Raises:
        ConfigError: names the key.
    """
    match = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)([KMBT]?)", text.strip())
    count = Decimal(match.group(1)) * _TOKEN_UNITS[match.group(2)] if match else None
    if count is None or count != int(count):
        raise ConfigError(
            f"{key}={text!r}: is not a token count", hint="write a whole number, or 500K, 2.5M, 200B, 1.8T"
        )
    return int(_decode_value(int, int(count), key))


def _type_error(key: str, value: object, expected: str) -> ConfigError:
    hint = f"`hlatctl config keys {key.partition('[')[0]}` says what it accepts"
    if expected == KINDS[str] and not isinstance(value, list | dict):
        hint = "put the value in quotes, as YAML text"
    return ConfigError(f"{key}={_YAML.get(str(value)) or _shown.repr(value)}: must be {expected}", hint=hint)
