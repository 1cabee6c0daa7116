"""The contract behind each score of a run: what must be equal to compare it with a score of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hlatctl.run import contract
from hlatctl.run.contract import Fields, Record, across_runs, digest
from hlatctl.run.evaluations import HELD_OUT

_Number = TypeVar("_Number", int, float)
#: Fields of a contract that decide a score, and that no version names.
_MORE = ("generation", "chat", "own", "fewshot_seed")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a score was measured; None means unknown.

    Args:
        shots: solved examples before each question; also None if there are none, or if tasks differ.
        limit: items per task, or a fraction of them; also None if all items were used.
        whole: all items of the datasets were used.
        data: hash of the datasets.
        definition: evaluator and task with their versions; None if the versions don't say everything: if answers are
            generated, prompts are a chat's, solved examples have a seed, or the task has a definition of the user's.
    """

    shots: int | None = None
    limit: float | None = None
    whole: bool | None = None
    data: str | None = None
    definition: str | None = None


def conditions_of_tasks(tasks: Mapping[str, Fields]) -> Conditions:
    """Return the conditions of a score of one or several tasks, from their contracts by name."""
    each = list(tasks.values())
    limits = [fields.get("limit") for fields in each]
    known = [fields for fields in each if isinstance(fields.get("items"), int)]
    whole = all(_is_whole(fields) for fields in known)
    return Conditions(
        shots=_same([fields.get("shots") for fields in each]),
        limit=_same(limits),
        whole=whole if each and len(known) == len(each) else None,
        data=_data(tasks),
        definition=_definition(tasks),
    )


def of_imported(record: Mapping[str, Any], origin: Mapping[str, Any]) -> Conditions:
    """Return the conditions of an imported score, as far as its file's origin and the score's record say them."""
    items, count = record.get("items"), record.get("n")
    version, task = origin.get("version"), record.get("version")
    return Conditions(
        shots=record.get("shots"),
        limit=origin.get("limit"),
        whole=None if items is None or count is None else count >= items,
        definition=f"{origin.get('form')} {version}, {task}" if version and task else None,
    )


def agree(one: Conditions, other: Conditions) -> bool:
    """Return whether two scores are known to be measured equally."""
    known = None not in (one.shots, one.whole, one.definition)
    return known and all(
        getattr(one, name) == getattr(other, name) for name in ("shots", "limit", "whole", "definition")
    )


def conditions_of_validation(fields: Fields) -> Conditions:
    """Return the conditions of a score of the held-out text, from its contract."""
    return Conditions(whole=True, data=fields.get("sha256"))


def of_mean(parts: Sequence[Conditions]) -> Conditions:
    """Return the conditions of a mean over several scores."""
    data = [part.data for part in parts]
    whole = [part.whole for part in parts]
    definitions = dict.fromkeys(part.definition for part in parts)
    return Conditions(
        shots=_same([part.shots for part in parts]),
        limit=_same([part.limit for part in parts]),
        whole=None if None in whole else all(whole),
        data=data[0] if len(data) == 1 else None if None in data else digest(data),
        definition=None if None in definitions else "; ".join(map(str, definitions)),
    )


def _is_whole(fields: Fields) -> bool:
    """Return whether all items of a task were used. Chosen items take precedence over the limit."""
    if "chosen" in fields:
        return len(fields["chosen"]) == int(fields["items"])
    return fields.get("limit") is None or bool(fields["limit"] >= fields["items"])


def _definition(tasks: Mapping[str, Fields]) -> str | None:
    """Return evaluator and version of the tasks; None if they are unknown, differ, or don't determine the prompts."""
    evaluators = {task.get("versions", {}).get("lm_eval") for task in tasks.values()}
    versions = {task.get("version") for task in tasks.values()}
    has_more = any(task.get(name) not in (None, {}) for task in tasks.values() for name in _MORE)
    if len(evaluators) != 1 or len(versions) != 1 or has_more:
        return None
    evaluator, version = evaluators.pop(), versions.pop()
    return f"lm_eval {evaluator}, {version}" if evaluator and version else None


def _data(tasks: Mapping[str, Fields]) -> str | None:
    hashes = {title: task.get("datasets") for title, task in tasks.items()}
    return digest(hashes) if hashes and all(hashes.values()) else None


def _same(values: Sequence[_Number | None]) -> _Number | None:
    return values[0] if len(set(values)) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Known:
    """The contract of a score.

    Args:
        key: equal for scores that can be compared; None if the score names no contract.
        fields: fields that determine the key; None if the contract is not recorded.
    """

    key: str | None
    fields: Fields | None = None
    conditions: Conditions = field(default_factory=Conditions)


class ScoreContracts:
    """Finds the contracts of a run's scores in the record of those that it has accepted."""

    def __init__(self, record: Record) -> None:
        self._tasks = {digest(fields): (name, fields) for name, known in record.tasks.items() for fields in known}
        self._figures = {digest(fields): fields for known in record.figures.values() for fields in known}

    def of(self, score: str, carried: str) -> Known:
        """Return the contract of a score; ``carried`` is the hash stored with it, empty if it has none."""
        if carried in self._tasks:
            if score.startswith(HELD_OUT):
                _, fields = self._tasks[carried]
                return Known(key=carried, fields=fields, conditions=conditions_of_validation(fields))
            return _of_tasks([self._tasks[carried]], None)
        if carried in self._figures:
            figure = self._figures[carried]
            return _of_tasks([self._tasks[part] for part in figure["tasks"].values() if part in self._tasks], figure)
        return Known(key=carried or None)


def first_difference(before: Fields, now: Fields) -> tuple[str, str, str] | None:
    """Return the first field in which two contracts differ, and both values; of groups, that of the first task."""
    parts, others = before.get("tasks", {}), now.get("tasks", {})
    for task in parts if parts.keys() == others.keys() else ():
        if difference := contract.first_difference(parts[task], others[task]):
            return difference
    return contract.first_difference(before, now)


def _of_tasks(tasks: Sequence[tuple[str, Fields]], figure: Fields | None) -> Known:
    compared = {name: across_runs(fields) for name, fields in tasks}
    fields = next(iter(compared.values())) if figure is None else {**figure, "tasks": compared}
    return Known(key=digest(fields), fields=fields, conditions=conditions_of_tasks(dict(tasks)))
