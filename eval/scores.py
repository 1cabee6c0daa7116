"""Scores as records, the contract under which scores can be compared, and the files that hold them.

A contract hash covers what was measured and how (suite, items, versions, settings), never the model: two checkpoints
with the same contract can be compared, and a saved score with another contract is measured again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.errors import EvaluationError

_VERSION = 1


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


def contract(settings: dict[str, Any], item_files: Mapping[str, Path]) -> str:
    """SHA-256 of what is measured and how.

    Args:
        settings: suite, versions and every setting that changes a score; JSON values.
        item_files: files whose content is what the model is asked, by what they are.
    """
    items = {name: files.sha256_file(path) for name, path in item_files.items()}
    text = json.dumps({"settings": settings, "items": items}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_results(path: Path, *, contract: str, step: int, **fields: Any) -> dict[str, Any]:
    """Write a results file, whole or not at all, and return what it holds."""
    record = {"v": _VERSION, "contract": contract, "step": step, **fields}
    files.write_json(path, record)
    return record


def read_results(path: Path, *, contract: str, step: int) -> dict[str, Any] | None:
    """A results file that was written for this step under this contract; None if there is no such file."""
    try:
        record = files.read_json(path)
        return record if (record["v"], record["contract"], record["step"]) == (_VERSION, contract, step) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
