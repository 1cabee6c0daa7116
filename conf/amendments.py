"""Amendments: what changes between two configurations, and which amendments an attempt begins with. Pure.

An amendment is a ``config_amended`` event. Its keys are the fields of the schema: a mapping such as ``backend.env``
changes as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conf.amendable import LIVE, begins
from conf.load import decode
from conf.schema import Config
from hlatctl.run.state import AmendmentState

Changes = dict[str, list[Any]]


def fields_of(config: Config) -> dict[str, Any]:
    """Return the plain value of every field by dotted key."""
    return dict(_fields(config, dataclasses.asdict(config), ""))


def _fields(value: Any, plain: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        item, key = getattr(value, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(item):
            yield from _fields(item, plain[field.name], f"{key}.")
        else:
            yield key, plain[field.name]


def changes_between(before: Config, after: Config) -> Changes:
    """Return old and new value of each field that differs."""
    old, new = fields_of(before), fields_of(after)
    return {key: [old[key], new[key]] for key in old if old[key] != new[key]}


def with_changes(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a configuration with other values of some fields.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type.
    """
    plain = dataclasses.asdict(config)
    for key, value in values.items():
        *groups, name = key.split(".")
        functools.reduce(dict.__getitem__, groups, plain)[name] = value
    return decode(plain)


def new_values(amendments: Sequence[AmendmentState]) -> dict[str, Any]:
    """Return the values after some amendments, by key."""
    return {key: new for amendment in amendments for key, (_, new) in amendment.changes.items()}


def is_at_once(amendment: AmendmentState) -> bool:
    """Return whether every key of an amendment changes without a restart. One without changes only sets a time."""
    return bool(amendment.changes) and begins(amendment.changes) == "at_once"


def beginning_at(amendments: Sequence[AmendmentState], step: int) -> int:
    """Return the number of the newest amendment of an attempt that continues after a step; 0: none.

    Amendments begin in order. One that is to begin after a later step holds back those after it, except those that
    change at once; one whose step has come takes along those before it.
    """
    ordered = [amendment for amendment in amendments if not is_at_once(amendment)]
    due = [a.number for a in ordered if a.applied_step is not None or (a.at_step is not None and a.at_step <= step)]
    number = max(due, default=0)
    for amendment in amendments:
        if amendment.number <= number:
            continue
        if amendment.at_step is not None:
            break
        number = amendment.number
    return number


def waiting(amendments: Sequence[AmendmentState], step: int) -> list[AmendmentState]:
    """Return the amendments that an attempt which continues after a step would not begin with."""
    number = beginning_at(amendments, step)
    return [a for a in amendments if a.number > number and not is_at_once(a)]


def ends_after(amendments: Sequence[AmendmentState], number: int) -> int | None:
    """Return the step after which an attempt ends for an amendment; None: for none.

    Args:
        amendments: of the run.
        number: the newest amendment that the attempt began with.
    """
    later = (a for a in amendments if a.number > number and not is_at_once(a))
    return min((a.at_step for a in later if a.at_step is not None), default=None)


def live(amendments: Sequence[AmendmentState], number: int) -> list[AmendmentState]:
    """Return the amendments after a number that change at once."""
    return [a for a in amendments if a.number > number and is_at_once(a)]


def live_values(amendments: Sequence[AmendmentState]) -> dict[str, Any]:
    """Return the values of amendments that the trainer reads while it trains, by key."""
    return {key: value for key, value in new_values(amendments).items() if key in LIVE}
