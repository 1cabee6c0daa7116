"""The scores of a milestone by task, for the formats of other evaluators."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hlatctl.report.items import folder_of
from hlatctl.run import contract as contract_record
from hlatctl.run import files
from hlatctl.run.contract import Fields, Record
from hlatctl.run.errors import EvaluationError
from hlatctl.run.evaluations import HELD_OUT
from hlatctl.run.files import DAMAGED, why
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState

Scores = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A task or a group.

    Args:
        scores: scores by name, as in results.json; the first has the entry's name if the entry has a first metric.
        metrics: the task's metrics as the harness computed them; empty for groups and code tasks.
        shots, version, items: from the contract; ``items`` are all of the dataset. None: not known.
    """

    name: str
    scores: Scores
    metrics: dict[str, Any]
    shots: int | None = None
    version: str | None = None
    items: int | None = None
    members: tuple[str, ...] = ()

    @property
    def count(self) -> int | None:
        """Number of items of the first score; None if unknown."""
        first = next(iter(self.scores.values()), {})
        return first.get("n") if isinstance(first.get("n"), int) else None

    def keyed(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Return metric, variant and record of each score; a metric's second score has its suffix as its variant."""
        first = next(iter(self.scores.values()), {}).get("metric")
        return [
            (
                str(record["metric"]),
                name.removeprefix(f"{self.name}_") if name != self.name and record["metric"] == first else "",
                record,
            )
            for name, record in self.scores.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The scores that a milestone's state shows, without the loss on held-out text.

    Args:
        contract: the first task's contract, for fields that all tasks share; empty if it is not recorded.
        contracts: hash stored with each task's results.
    """

    run: RunPaths
    milestone: MilestoneState
    entries: list[Entry]
    contract: Fields
    contracts: dict[str, str]

    @property
    def harness(self) -> str | None:
        """Version of lm-evaluation-harness; None if not known."""
        version = self.contract.get("versions", {}).get("lm_eval")
        return None if version is None else str(version)

    @property
    def origin(self) -> dict[str, Any]:
        """Origin of the scores; each format has it under ``hlatctl``."""
        return {
            "run_id": self.run.run_id,
            "step": self.milestone.step,
            "tokens": self.milestone.milestone_tokens,
            "contracts": self.contracts,
            "lm_eval_version": self.harness,
            "skipped": self.milestone.skipped,
        }


def read(run: RunPaths, milestone: MilestoneState) -> Exported:
    """Return the scores of a milestone; EvaluationError if a task's file is damaged, or there is none."""
    records = _records(run, milestone)
    known = Record()
    with suppress(EvaluationError):
        known = contract_record.read_record(run)
    hashes = {name: str(record.get("contract", "")) for name, record in records.items()}
    asked = {name: known.fields(name, contract) for name, contract in hashes.items()}
    taken = {name for record in records.values() for name in record["scores"]}
    others = {name: score for name, score in milestone.scores.items() if name not in taken and not _is_loss(name)}
    groups = _grouped(others, [*known.groups, *asked])
    tasks = [
        Entry(
            name=name,
            scores=record["scores"],
            metrics=record["metrics"],
            shots=asked[name].get("shots"),
            version=asked[name].get("version"),
            items=asked[name].get("items"),
        )
        for name, record in records.items()
    ]
    return Exported(
        run=run,
        milestone=milestone,
        entries=tasks + [_group(name, of_group, known) for name, of_group in groups.items()],
        contract=next(filter(None, asked.values()), {}),
        contracts=hashes,
    )


def _group(name: str, scores: Scores, known: Record) -> Entry:
    return Entry(name=name, scores=scores, metrics={}, members=tuple(known.groups.get(name, ())))


def _is_loss(name: str) -> bool:
    return name.startswith(HELD_OUT)


def _grouped(scores: Scores, titles: list[str]) -> dict[str, Scores]:
    found: dict[str, Scores] = {}
    for name, score in scores.items():
        owners = [title for title in titles if name == title or _is_second(name, title, scores)]
        found.setdefault(max(owners, key=len, default=name), {})[name] = score
    return found


def _is_second(name: str, title: str, scores: Scores) -> bool:
    return name.startswith(f"{title}_") and scores.get(title, {}).get("n") == scores[name].get("n")


def _records(run: RunPaths, milestone: MilestoneState) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted((folder_of(run, milestone) / "tasks").glob("*.json")):
        try:
            record = files.read_sealed_json(path)
            is_loss = all(_is_loss(name) for name in record["scores"]) and not record["metrics"]
        except (OSError, *DAMAGED) as error:
            raise EvaluationError(
                f"{path}: can't be read ({why(error)})", hint=f"move it away, then `hlatctl eval {run.run_id}`"
            ) from None
        if not is_loss:
            found[path.stem] = record
    if not found:
        raise EvaluationError(
            f"run {run.run_id}: no task of {milestone.milestone_tokens:,} tokens has a file of results",
            hint=f"simulations and imports have none; `hlatctl compare {run.run_id} --format json` has the scores",
        )
    return found
