"""The contract of a task: everything that decides its score except the model's weights, as a JSON object.

``eval.contract`` makes the contracts of an evaluation. This module compares them, and records those that a run has
accepted in ``evals/contract.json``. Of their fields it knows only the model's own files.

Each task has a list of its contracts, in the order in which the run accepted them. They are numbered from 1, and number
1 is the run's own. An evaluation is refused if a task's contract is not in the list, with the task and the first field
that differs, unless the user asks for a new contract. A task that the run has not evaluated before is always accepted,
and so is the figure of a group, which is computed from accepted scores.

Which recorded contracts are used: they measured something, or an evaluation runs under them.

A contract is recorded before its task is measured. If the evaluation then fails, the contract stays without results.
An evaluation names its contracts in a file beside its lease; the file counts while the process that wrote it holds the
lease.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import EvaluationError
from hlatctl.run.files import DAMAGED, why
from hlatctl.run.journal import read_events
from hlatctl.run.lease import Holder, hold, holder
from hlatctl.run.paths import RunPaths

Fields = dict[str, Any]

#: The held-out text of a run, which is scored like a task.
VALIDATION = "validation"
#: The field of a contract with the model's own files except the weights.
MODEL = "model"
#: The number of the contracts that a run accepted first, and the contract of simulated evaluations.
OWN = 1
SIMULATED = "simulated"
_ABSENT = object()
NOT_RECORDED = "not recorded"


@dataclass(frozen=True, kw_only=True)
class Contracts:
    """The contracts of one evaluation.

    Args:
        tasks: contracts by task name; the held-out text is the task :data:`VALIDATION`.
        figures: contracts of groups by name; ``tasks`` of each has the hash of each part's contract.
    """

    tasks: dict[str, Fields]
    figures: dict[str, Fields] = field(default_factory=dict)

    @property
    def hashes(self) -> dict[str, str]:
        """The hash of each contract, by the name of its task or group."""
        return {name: digest(fields) for name, fields in {**self.tasks, **self.figures}.items()}


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, as hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def across_runs(fields: Fields) -> Fields:
    """Return the fields that must be equal to compare the scores of two runs. Models can have different tokenizers."""
    return {key: value for key, value in fields.items() if key != MODEL}


def first_difference(before: Any, now: Any) -> tuple[str, str, str] | None:
    """Return the first field in which two contracts differ, and both values as text. None if they are equal."""
    return next(_differences(before, now, ""), None)


def differences(before: Fields, now: Fields) -> list[tuple[str, str, str]]:
    """Return all fields in which two contracts differ, each with both values as text."""
    return list(_differences(before, now, ""))


def _differences(before: Any, now: Any, name: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(now, dict) and (isinstance(before, dict) or (before is _ABSENT and now)):
        before = before if isinstance(before, dict) else {}  # name a field of an object that was not recorded
        for key in dict.fromkeys([*now, *before]):  # fields that were not recorded come first
            yield from _differences(before.get(key, _ABSENT), now.get(key, _ABSENT), f"{name}.{key}" if name else key)
    elif before != now:
        yield name, _text(before), _text(now)


def _text(value: Any) -> str:
    if value is _ABSENT or isinstance(value, dict):
        return NOT_RECORDED if value is _ABSENT else "recorded"
    return value[:16] if isinstance(value, str) and len(value) == 64 else json.dumps(value)


_IN_USE = "contracts-in-use.json"
#: Files of a task in the folder of a contract's results; the next try reuses answers.
_STORED = ("tasks/{}.json", "answers/{}.jsonl", "items-{}.parquet")


class Use:
    """Which contracts of a run are in use now.

    Args:
        run: run directory. Its journal is read at most once, and only for contracts without result files.
    """

    def __init__(self, run: RunPaths) -> None:
        self._run = run

    @cached_property
    def running(self) -> set[str]:
        """The hashes of the contracts under which evaluations run."""
        return {name for path in self._run.evals.glob(f"tokens-*/{_IN_USE}") for name in _named(path)}

    def has_results(self, task: str, number: str, folder: str) -> bool:
        """Return whether a task has scores or answers under a contract, at any milestone.

        Args:
            folder: name of the contract's results folder in a milestone's folder.
        """
        places = (path / folder for path in self._run.evals.glob("tokens-*"))
        stored = (place / name.format(task) for place in places for name in _STORED)
        return any(path.exists() for path in stored) or (task, number) in self._finished

    @cached_property
    def _finished(self) -> set[tuple[Any, Any]]:
        events = read_events(self._run, wanted=lambda line: b"eval_task_finished" in line)
        return {(event.get("task"), event.get("contract")) for event in events}


def announce(run: RunPaths, milestone_tokens: int, hashes: Iterable[str]) -> None:
    """Record the contracts that this process evaluates under; it holds the milestone's lease."""
    named = holder(run.eval_lease(milestone_tokens))
    files.write_json(_file(run, milestone_tokens), {"token": named.token if named else "", "contracts": list(hashes)})


@contextmanager
def withdrawn(run: RunPaths, milestone_tokens: int) -> Iterator[None]:
    """Remove the names of an evaluation's contracts at its end."""
    try:
        yield
    finally:
        _file(run, milestone_tokens).unlink(missing_ok=True)


def _named(path: Path) -> list[str]:
    """Return the contracts that a file names, if its writer still holds the lease in the same folder."""
    evaluator = holder(path.with_name("lease"))
    if evaluator is None:
        return []
    try:
        record = files.read_json(path)
        return [str(name) for name in record["contracts"]] if record["token"] == evaluator.token else []
    except (OSError, *DAMAGED):
        return []


def _file(run: RunPaths, milestone_tokens: int) -> Path:
    return run.eval(milestone_tokens) / _IN_USE


_VERSION = 2
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Record:
    """The contracts that a run has accepted.

    Args:
        tasks, figures: by name, in the order in which they were accepted.
    """

    tasks: dict[str, list[Fields]] = field(default_factory=dict)
    figures: dict[str, list[Fields]] = field(default_factory=dict)

    @property
    def groups(self) -> dict[str, list[str]]:
        """The tasks of each group, under the run's own contracts."""
        return {name: list(known[0]["tasks"]) for name, known in self.figures.items()}

    def fields(self, task: str, contract: str) -> Fields:
        """Return a task's contract by the hash that its results carry. Empty if it is not recorded."""
        return next((fields for fields in self.tasks.get(task, ()) if digest(fields) == contract), {})

    def numbered(self, number: int) -> Contracts:
        """Return the contracts of one number, of all tasks and groups that have it."""
        place = number - OWN
        tasks, figures = (
            {name: known[place] for name, known in table.items() if 0 <= place < len(known)}
            for table in (self.tasks, self.figures)
        )
        return Contracts(tasks=tasks, figures=figures)

    def find(self, task: str, contract: str) -> int | None:
        """Return the number of a task's contract, by its hash; None if it was not accepted."""
        known = enumerate(self.tasks.get(task, ()), OWN)
        return next((number for number, fields in known if digest(fields) == contract), None)

    def numbers(self, present: Contracts) -> dict[str, int]:
        """Return the number of each contract of an evaluation that was accepted, by the name of its task or group."""
        return {
            name: OWN + table[name].index(fields)
            for table, wanted in ((self.tasks, present.tasks), (self.figures, present.figures))
            for name, fields in wanted.items()
        }


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The answer to an evaluation: the record with its contracts, and their numbers by task or group.

    ``dropped`` says which contracts without results were dropped; empty if none was.
    """

    record: Record
    numbers: dict[str, int]
    dropped: str = ""


def own_contracts(run: RunPaths) -> str:
    """Return the contract that the journal names for the run's own scores.

    Empty before the first evaluation, or if the record is damaged.
    """
    try:
        known = read_record(run)
    except EvaluationError:
        return ""
    return str(OWN) if known.tasks else ""


def folder(contract: str) -> str:
    """Return the subfolder of a milestone's folder that has the results of a contract, as the journal names it.

    Empty for the run's own contract, and for simulated ones.
    """
    return f"contract-{contract}" if contract.isdecimal() and len(contract) < 10 and contract != str(OWN) else ""


def read_record(run: RunPaths) -> Record:
    """Return the contracts that a run has accepted. Empty before its first evaluation.

    Raises:
        EvaluationError: the record is damaged.
    """
    try:
        found = files.read_sealed_json(run.contract)
        if found["v"] != _VERSION:
            raise ValueError(f"version {found['v']}")
        tasks, figures = (
            {str(name): [dict(fields) for fields in known] for name, known in found[table].items()}
            for table in ("tasks", "figures")
        )
        return Record(tasks=tasks, figures=figures)
    except FileNotFoundError:
        return Record()
    except (OSError, *DAMAGED) as error:
        raise EvaluationError(
            f"{run.contract}: can't be read ({why(error)}), so the contracts of the run's scores are unknown",
            hint="restore it from a copy; or move it away, and the next evaluation records its own",
        ) from None


def admit(run: RunPaths, present: Contracts, *, new: bool = False, milestone_tokens: int | None = None) -> Accepted:
    """Record the contracts of an evaluation that is about to start, and return their numbers.

    Args:
        new: accept contracts that differ from all recorded ones of their tasks.
        milestone_tokens: milestone whose lease this process holds. Its contracts are in use until
            :func:`withdrawn` ends, or until the lease does.

    Raises:
        EvaluationError: one differs. Names the task, the first field and both values.
    """
    with hold(run.contract.with_suffix(".lock"), _wait):
        known = read_record(run)
        accepted = _accept(run, known, present, new=new)
        if accepted.record != known:
            record = {"v": _VERSION, "tasks": accepted.record.tasks, "figures": accepted.record.figures}
            files.write_sealed_json(run.contract, record)
        if milestone_tokens is not None:
            announce(run, milestone_tokens, present.hashes.values())
        return accepted


def check_record(run: RunPaths, present: Contracts, *, new: bool = False) -> Accepted:
    """Return the same as :func:`admit`, but record nothing."""
    return _accept(run, read_record(run), present, new=new)


def _accept(run: RunPaths, known: Record, present: Contracts, *, new: bool) -> Accepted:
    dropped, before = "", known
    if others := _unknown(known, present):
        known = _without_unused(run, known, others)
        dropped = _dropped(before, known, present, others)
        others = _unknown(known, present)
    if others and not new:
        raise _refusal(run, known, present, others)
    record = Record(tasks=_with(known.tasks, present.tasks), figures=_with(known.figures, present.figures))
    return Accepted(record=record, numbers=record.numbers(present), dropped=dropped)


def _unknown(known: Record, present: Contracts) -> list[str]:
    return [name for name, fields in present.tasks.items() if fields not in known.tasks.get(name, [fields])]


def _without_unused(run: RunPaths, known: Record, tasks: list[str]) -> Record:
    """Return the record without the last contracts of tasks that are unused, and without the figures made of them."""
    use, gone, lists = Use(run), set(), dict(known.tasks)
    for task in tasks:
        while fields := lists.get(task):
            number, last = len(fields), digest(fields[-1])
            if last in use.running or use.has_results(task, str(number), folder(str(number))):
                break
            gone.add(last)
            lists[task] = fields[:-1]
    figures = dict(known.figures)
    for name in figures:
        while figures[name] and gone & set(figures[name][-1]["tasks"].values()):
            figures[name] = figures[name][:-1]
    tasks_left, figures_left = ({n: c for n, c in table.items() if c} for table in (lists, figures))
    return Record(tasks=tasks_left, figures=figures_left)


def _dropped(before: Record, known: Record, present: Contracts, tasks: list[str]) -> str:
    """Return which contracts were dropped, with the first field of the first one; empty if none was."""
    fewer = [task for task in tasks if len(known.tasks.get(task, ())) < len(before.tasks[task])]
    if not fewer:
        return ""
    task = fewer[0]
    difference = first_difference(before.tasks[task][-1], present.tasks[task])
    assert difference is not None, "an equal contract is kept"
    name, was, now = difference
    more = f" ({len(fewer) - 1} more tasks)" if len(fewer) > 1 else ""
    return (
        f"the contract of {task}{more} in an earlier evaluation that measured nothing is replaced: "
        f"{name} was {was} and is {now} now"
    )


def _with(known: Mapping[str, list[Fields]], present: Mapping[str, Fields]) -> dict[str, list[Fields]]:
    lists = {name: list(fields) for name, fields in known.items()}
    for name, fields in present.items():
        if fields not in lists.setdefault(name, []):
            lists[name].append(fields)
    return lists


def _refusal(run: RunPaths, known: Record, present: Contracts, others: list[str]) -> EvaluationError:
    task, fields = others[0], present.tasks[others[0]]
    nearest = min(known.tasks[task], key=lambda recorded: len(differences(recorded, fields)))
    difference = first_difference(nearest, fields)
    assert difference is not None, "an equal contract is not refused"
    name, before, now = difference
    more = f" ({len(others) - 1} more tasks differ)" if len(others) > 1 else ""
    apart = f"`hlatctl eval {run.run_id} --new-contract`, with the same OVERRIDES, keeps the scores of both apart"
    return EvaluationError(
        f"{run.contract}: {task}: {name} was {before} when this run was evaluated before and is {now} now{more}; "
        "scores of both can't be compared",
        hint=apart if before == NOT_RECORDED else f"put it back; or {apart}",
    )


def _wait(holder: Holder) -> None:
    time.sleep(_POLL_S)
