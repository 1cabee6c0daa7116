"""The contracts of a run's evaluations: what they measure and how. Recorded once, then compared.

A contract is a JSON object that ``eval.contract`` makes. ``evals/contract.json`` has the contracts that a run has
accepted; the first is the run's own. An evaluation under another contract is refused with the first difference, unless
the user asks for a new contract. This module doesn't interpret the fields.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import EvaluationError
from hlatctl.run.lease import Holder, hold
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import DAMAGED, why

Fields = dict[str, Any]

#: The fields of a contract that belong to one run: its held-out text, and its model's files except the weights.
VALIDATION, MODEL = "validation", "model"
_VERSION = 1
_POLL_S = 0.05
_ABSENT = object()
_NOT_RECORDED = "not recorded"


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, as hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def of_tasks(fields: Fields) -> str:
    """Return the hash that the scores of tasks carry: of all fields except the held-out text."""
    return digest({key: value for key, value in fields.items() if key != VALIDATION})


def across_runs(fields: Fields) -> Fields:
    """Return the fields that must be equal to compare the scores of two runs. Models can have different tokenizers."""
    return {key: value for key, value in fields.items() if key not in (VALIDATION, MODEL)}


def of_validation(fields: Fields) -> str:
    """Return the hash that the scores of the held-out text carry."""
    return digest({VALIDATION: fields.get(VALIDATION)})


def own(run: RunPaths) -> str:
    """Return the hash of the run's own contract. Empty before its first evaluation, or if the record is damaged."""
    try:
        known = recorded(run)
    except EvaluationError:
        return ""
    return of_tasks(known[0]) if known else ""


def recorded(run: RunPaths) -> list[Fields]:
    """Return the contracts that a run has accepted, its own first. Empty before its first evaluation.

    Raises:
        EvaluationError: the record is damaged.
    """
    try:
        record = files.read_sealed_json(run.contract)
        if record["v"] != _VERSION:
            raise ValueError(f"version {record['v']}")
        return [dict(fields) for fields in record["contracts"]]
    except FileNotFoundError:
        return []
    except (OSError, *DAMAGED) as error:
        raise EvaluationError(
            f"{run.contract}: can't be read ({why(error)}), so the contract of the run's scores is unknown",
            hint="restore it from a copy; or move it away, and the next evaluation records its own",
        ) from None


def admit(run: RunPaths, present: Fields, *, new: bool = False) -> int:
    """Return the index of a contract among those that the run has accepted; 0 is the run's own. Record a new one.

    Args:
        run: the run directory.
        present: the contract of the evaluation that is about to start.
        new: accept it if it differs from all recorded ones.

    Raises:
        EvaluationError: it differs from the recorded ones. Names the first field and both values.
    """
    with hold(run.contract.with_suffix(".lock"), _wait):
        known = recorded(run)
        place = _place(run, known, present, new=new)
        if place < len(known):
            return place
        files.write_sealed_json(run.contract, {"v": _VERSION, "contracts": [*known, present]})
        return place


def results_folder(present: Fields, place: int) -> str:
    """Return the subfolder of a milestone's results. Empty for the run's own contract."""
    return f"contract-{digest(present)[:12]}" if place else ""


def check(run: RunPaths, present: Fields, *, new: bool = False) -> int:
    """Return the same index as :func:`admit`, but record nothing."""
    return _place(run, recorded(run), present, new=new)


def first_difference(before: Any, now: Any) -> tuple[str, str, str] | None:
    """Return the first field in which two contracts differ, and both values as text. None if they are equal."""
    return next(_differences(before, now, ""), None)


def _differences(before: Any, now: Any, name: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(now, dict) and (isinstance(before, dict) or (before is _ABSENT and now)):
        before = before if isinstance(before, dict) else {}  # name a field of an object that was not recorded
        for key in dict.fromkeys([*now, *before]):  # fields that an older release did not record come first
            yield from _differences(before.get(key, _ABSENT), now.get(key, _ABSENT), f"{name}.{key}" if name else key)
    elif before != now:
        yield name, _text(before), _text(now)


def _text(value: Any) -> str:
    if value is _ABSENT or isinstance(value, dict):
        return _NOT_RECORDED if value is _ABSENT else "recorded"
    return value[:16] if isinstance(value, str) and len(value) == 64 else json.dumps(value)


def _place(run: RunPaths, known: list[Fields], present: Fields, *, new: bool) -> int:
    if present in known:
        return known.index(present)
    if known and not new:
        raise _refusal(run, known, present)
    return len(known)


def _refusal(run: RunPaths, known: list[Fields], present: Fields) -> EvaluationError:
    # Compare with the most similar contract, among those with the same tasks if there are any.
    alike = [fields for fields in known if set(fields.get("tasks", ())) == set(present.get("tasks", ()))]
    nearest = min(alike or known, key=lambda fields: sum(1 for _ in _differences(fields, present, "")))
    difference = first_difference(nearest, present)
    assert difference is not None, "an equal contract is not refused"
    name, before, now = difference
    apart = f"`hlatctl eval {run.run_id} --new-contract`, with the same OVERRIDES, keeps the scores of both apart"
    return EvaluationError(
        f"{run.contract}: {name} was {before} when this run was evaluated before and is {now} now; "
        "scores of both can't be compared",
        hint=apart if before == _NOT_RECORDED else f"put it back; or {apart}",
    )


def _wait(holder: Holder) -> None:
    time.sleep(_POLL_S)
