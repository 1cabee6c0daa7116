"""Scores as records, and the files that hold them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import EvaluationError

_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number and how sure it is.

    Args:
        metric: what the value is, such as ``acc`` or ``loss_nats_per_token``.
        stderr: standard error of the value; None where it can't be estimated.
        n: items (for validation: tokens) that the value is taken over.
    """

    metric: str
    value: float
    stderr: float | None
    n: int


Scores = dict[str, Score]


def check_finite(scores: Scores) -> None:
    """Refuse scores that are no numbers: the weights are broken, and a plot must not hide that.

    Raises:
        EvaluationError: names the score.
    """
    for name, score in scores.items():
        if not math.isfinite(score.value):
            raise EvaluationError(
                f"{name}: {score.metric} is {score.value}, so the model's weights are not usable",
                hint="training has diverged; look at loss and gradient norm before this step",
            )


def to_json(scores: Scores) -> dict[str, dict[str, Any]]:
    """Scores as they stand in results.json and in the journal."""
    return {name: asdict(score) for name, score in scores.items()}


class DamagedResultsError(ValueError):
    """A results file that is there and can't be read, or is not as it was written."""


def write_results(path: Path, *, identity: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Write a results file with its own checksum, whole or not at all, and return what it holds."""
    record = {"v": _VERSION, **identity, **fields}
    files.write_sealed_json(path, record)
    return record


def read_results(path: Path, *, identity: dict[str, Any]) -> dict[str, Any] | None:
    """A results file that was written for just this (step, weights, contract); None if there is none.

    Raises:
        DamagedResultsError: it is not as it was written.
    """
    try:
        record = files.read_sealed_json(path)
        wanted = {"v": _VERSION, **identity}
        return record if {key: record.get(key) for key in wanted} == wanted else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedResultsError(f"{path}: can't be used ({error})") from None
