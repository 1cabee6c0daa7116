"""Results of a milestone: each task's results by its contract, and results.json, which combines them.

Results are in the milestone's folder, and those of contracts other than the run's own in its subfolders (see
``hlatctl.run.contract``). results.json contains all tasks and groups of its number, whichever evaluation measured
them. It is computed from the tasks' files alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval import harness, scores
from eval.tasks.catalog import Group
from eval.tasks.plan import Figure
from hlatctl.run import contract as contract_record
from hlatctl.run.contract import Fields, Record, digest

RESULTS = "results.json"


class Results:
    """The stored results of one model at one milestone.

    Args:
        model: fields that identify the evaluated model: step and weights; results of other models are not used.
        record: the contracts that the run has accepted.
        damaged: called with the path of a damaged file and a message.
    """

    def __init__(
        self, milestone: Path, model: dict[str, Any], record: Record, damaged: Callable[[Path, str], None]
    ) -> None:
        self._milestone, self._model, self._record, self._damaged = milestone, model, record, damaged

    def folder(self, number: int) -> Path:
        """Return the folder of the results of a contract."""
        return self._milestone / contract_record.folder(str(number))

    def of_task(self, task: str, contract: str, then: str = "its scores are left out") -> dict[str, Any] | None:
        """Return a task's results under a contract's hash, or None; ``then`` is reported if the file is damaged."""
        number = self._record.find(task, contract)
        if number is None:
            return None
        path = self.folder(number) / "tasks" / f"{task}.json"
        return self._read(path, {**self._model, "contract": contract}, then)

    def combined(self, number: int) -> dict[str, Any] | None:
        """Return the record of results.json; None if there is none."""
        return self._read(self.folder(number) / RESULTS, {**self._model, "contract": str(number)}, "written again")

    def combine(
        self, number: int, before: dict[str, Any] | None, skipped: dict[str, str], notes: list[str], **fields: Any
    ) -> dict[str, Any]:
        """Combine the results of all tasks and groups that have a contract of this number; write and return them.

        Args:
            before: the record of results.json until now.
            skipped: tasks that could not run now, with the reason. Those of earlier evaluations are kept.
        """
        before = before or {"skipped": {}, "notes": []}
        present = self._record.numbered(number)
        found = {name: self.of_task(name, digest(one)) for name, one in present.tasks.items()}
        records = {name: record for name, record in found.items() if record}
        all_scores = {title: score for record in records.values() for title, score in record["scores"].items()}
        hashes = {name: record["contract"] for name, record in records.items()}
        known = {record["contract"]: record for record in records.values()}
        for name, figure in present.figures.items():
            if (parts := self._parts(figure, known)) is not None:
                hashes[name] = digest(figure)
                all_scores |= _named(harness.figure(_figure(name, figure), parts), hashes[name])
        return scores.write_results(
            self.folder(number) / RESULTS,
            identity={**self._model, "contract": str(number)},
            contracts=hashes,
            scores=all_scores,
            skipped={name: why for name, why in {**before["skipped"], **skipped}.items() if name not in records},
            notes=list(dict.fromkeys([*before["notes"], *notes])),
            wall_s=round(sum(record["wall_s"] for record in records.values()), 3),
            **fields,
        )

    def _parts(self, figure: Fields, known: dict[str, dict[str, Any]]) -> dict[str, harness.Metrics] | None:
        """Return the metrics of a group's tasks under its contract; None if one is missing."""
        metrics = {}
        for task, contract in figure["tasks"].items():
            record = known.get(contract) or self.of_task(task, contract)
            if record is None:
                return None
            metrics[task] = record["metrics"]
        return metrics

    def _read(self, path: Path, identity: dict[str, Any], then: str) -> dict[str, Any] | None:
        try:
            return scores.read_results(path, identity=identity)
        except scores.DamagedResultsError as error:
            self._damaged(path, f"{error}; {then}")
            return None


def _figure(name: str, fields: Fields) -> Figure:
    group = Group(name=name, tasks=tuple(fields["tasks"]), aggregate=fields["aggregate"])
    return Figure(group=group, metrics=tuple(fields["metrics"]))


def _named(found: scores.Scores, contract: str) -> dict[str, dict[str, Any]]:
    return {title: {**score, "contract": contract} for title, score in scores.to_json(found).items()}
