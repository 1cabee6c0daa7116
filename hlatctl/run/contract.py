"""The frozen contract of a run's evaluations: what was measured and how, recorded once, compared ever after.

A contract is a JSON object that ``eval.contract`` makes. ``evals/contract.json`` holds those that a run has admitted,
the first one being the run's own; an evaluation under none of them is refused with the first difference, or admitted as
another contract when a person asks for it. What the fields mean is not this module's business.
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

#: The parts of a contract that belong to a run: its held-out text, and its model's files besides the weights.
VALIDATION, MODEL = "validation", "model"
_VERSION = 1
_POLL_S = 0.05
_ABSENT = object()
_NOT_RECORDED = "not recorded"


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, as hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def of_tasks(fields: Fields) -> str:
    """The hash that the scores of tasks carry: of all but the held-out text."""
    return digest({key: value for key, value in fields.items() if key != VALIDATION})


def across_runs(fields: Fields) -> Fields:
    """What must be equal for two runs' scores of tasks to be comparable: each model may have its own tokenizer."""
    return {key: value for key, value in fields.items() if key not in (VALIDATION, MODEL)}


def of_validation(fields: Fields) -> str:
    """The hash that the scores of the held-out text carry."""
    return digest({VALIDATION: fields.get(VALIDATION)})


def own(run: RunPaths) -> str:
    """The hash of the run's own contract; empty before its first evaluation, and where the record can't be read."""
    try:
        known = recorded(run)
    except EvaluationError:
        return ""
    return of_tasks(known[0]) if known else ""


def recorded(run: RunPaths) -> list[Fields]:
    """The contracts that a run has admitted, its own first; none before its first evaluation.

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
            f"{run.contract}: can't be read ({why(error)}), so nobody knows what the run's scores were measured under",
            hint="restore it from a copy; or move it away, and the next evaluation records its own",
        ) from None


def admit(run: RunPaths, present: Fields, *, new: bool = False) -> int:
    """The place of a contract among those that the run has admitted; 0 is the run's own. The first one is recorded.

    Args:
        run: the run directory.
        present: of the evaluation that is about to begin.
        new: admit it as another contract if it differs from all of them.

    Raises:
        EvaluationError: it differs; names the first field, its recorded and its present value.
    """
    with hold(run.contract.with_suffix(".lock"), _wait):
        known = recorded(run)
        place = _place(run, known, present, new=new)
        if place < len(known):
            return place
        files.write_sealed_json(run.contract, {"v": _VERSION, "contracts": [*known, present]})
        return place


def results_folder(present: Fields, place: int) -> str:
    """Where results lie in a milestone's folder: in itself under the run's own contract, below it under another."""
    return f"contract-{digest(present)[:12]}" if place else ""


def check(run: RunPaths, present: Fields, *, new: bool = False) -> int:
    """As :func:`admit`, but records nothing."""
    return _place(run, recorded(run), present, new=new)


def first_difference(before: Any, now: Any) -> tuple[str, str, str] | None:
    """The first field in which two contracts differ, and both values as text; None if they are equal."""
    return next(_differences(before, now, ""), None)


def _differences(before: Any, now: Any, name: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(now, dict) and (isinstance(before, dict) or (before is _ABSENT and now)):
        before = before if isinstance(before, dict) else {}  # of a part that was not recorded, name a field
        for key in dict.fromkeys([*now, *before]):  # what an older release did not record comes before what it hashed
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
    # Of several, a person means to repeat the one with the same tasks, and of these the most similar one.
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
