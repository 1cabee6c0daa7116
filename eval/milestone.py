"""Evaluate one milestone, from start to results; read ``evaluate`` from top to bottom.

Results are stored as soon as they are known. So a later try repeats no scored task and no generated answer, and
results.json is written last. One process at a time evaluates a milestone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.of_run import of_run
from conf.schema import Config
from eval import contract, programs, task_runner, validation
from eval.results import RESULTS
from eval.serving import model, runners
from eval.task_runner import Subject, TaskRunner, can_run_code
from eval.tasks import plan, suites
from hlatctl.run import contract as contract_record
from hlatctl.run import contract as contract_use
from hlatctl.run.contract import Contracts
from hlatctl.run.files import private_folder
from hlatctl.run.journal import JournalWriter, eval_writer
from hlatctl.run.lease import Holder, hold
from hlatctl.run.model_folder import read_link

_LEASE_POLL_S = 0.5


def evaluate(
    subject: Subject, *, config: Config | None = None, new_contract: bool = False, try_number: int = 1
) -> list[Path]:
    """Evaluate an exported checkpoint and return the paths of its results.json files, one for each contract number.

    Only missing tasks run: those that an interrupted try did not score, and those that could not run then but can now.
    If another process evaluates the same milestone, this one waits until the other has ended.

    Args:
        subject: the checkpoint to evaluate; ``config.yaml`` and ``dataset.json`` of its run are read.
        config: replaces the run's configuration.
        new_contract: allow tasks whose contracts differ from the run's; their results are stored apart.
    """
    began_s, usual = time.monotonic(), of_run(subject.run)
    config = config or usual
    with private_folder("eval") as own:
        model.settle_environment(own.path, offline=not plan.uses_network(config.eval))
        planned, held_out, present = _prepare(subject, config, own.path)
        with hold(subject.run.eval_lease(subject.milestone_tokens), _wait()), ExitStack() as held:
            held.enter_context(contract_use.withdrawn(subject.run, subject.milestone_tokens))
            accepted = contract_record.admit(
                subject.run, present, new=new_contract, milestone_tokens=subject.milestone_tokens
            )
            journal = held.enter_context(JournalWriter(subject.run, eval_writer(subject.milestone_tokens)))
            runner = TaskRunner(
                subject=subject,
                config=config,
                contracts={name: (hash_, accepted.numbers[name]) for name, hash_ in present.hashes.items()},
                record=accepted.record,
                held_out=held_out,
                scratch=own.path,
                journal=journal,
                held=held,
            )
            if accepted.dropped:
                runner.append("eval_contract_replaced", message=accepted.dropped)
            is_chosen = usual.eval.enabled and _tasks_of(config) != _tasks_of(usual)
            remarks = [accepted.dropped] if accepted.dropped else []
            return _Evaluation(runner, planned, remarks, is_chosen=is_chosen).run(try_number, began_s)


def _tasks_of(config: Config) -> tuple[Any, ...]:
    wanted = config.eval
    return wanted.suite, wanted.groups, wanted.tasks, wanted.limit, wanted.items


def _wait() -> Callable[[Holder], None]:
    """Return a function that waits for the holder of a lease, and reports each holder once."""
    reported: set[Holder] = set()

    def wait(holder: Holder) -> None:
        if holder.pid and holder not in reported:
            reported.add(holder)
            since = datetime.fromtimestamp(holder.since_unix_s, UTC).strftime("%H:%M:%S")
            print(
                f"waiting: {holder} has been evaluating this milestone since {since} UTC", file=sys.stderr, flush=True
            )
        time.sleep(_LEASE_POLL_S)

    return wait


def _prepare(subject: Subject, config: Config, scratch: Path) -> tuple[plan.EvaluationPlan, Path | None, Contracts]:
    """Check tasks, packages and model; return the plan, the held-out text (None if not scored) and the contracts."""
    planned = plan.make(config.eval, scratch)
    runners.check(config.eval.runner)
    contract.package_versions()  # fails with the missing package's name, before an import fails without a hint
    model.check_folder(subject.model_folder)
    if any(task.is_code for task in planned.tasks) and (note := programs.without_sandbox(config.eval.code)):
        planned.notes.append(note)
    if (link := read_link(subject.model_folder)) and link.left_out:
        planned.notes.append(
            f"transformers' model has no place for {len(link.left_out)} tensors, such as {link.left_out[0]}; it was "
            "evaluated without them"
        )
    external, folder = subject.from_elsewhere, subject.model_folder
    text = validation.held_out(None if external else subject.run, config) if planned.validation else None
    return planned, text, contract.make(config, planned, text, scratch, folder=folder, from_elsewhere=external)


class _Evaluation:
    """Run the tasks of a plan and write results.json; ``is_chosen``: the plan isn't that of the run's own suite."""

    def __init__(
        self, runner: TaskRunner, planned: plan.EvaluationPlan, remarks: list[str], *, is_chosen: bool
    ) -> None:
        self._runner, self._plan, self._remarks = runner, planned, remarks
        self._is_chosen = is_chosen
        self._tasks: dict[str, suites.Task | None] = {suites.VALIDATION: None} if runner.held_out else {}
        self._tasks |= {task.name: task for task in planned.tasks}
        self._numbers = sorted({number for _, number in runner.contracts.values()})

    def run(self, try_number: int, began_s: float) -> list[Path]:
        """Run what is missing and return the paths of the results.json files; ``began_s`` is on the monotonic clock."""
        runner, step = self._runner, self._runner.subject.step
        suite = runner.config.eval.suite
        records = {number: runner.results.combined(number) for number in self._numbers}
        if not self._is_complete(records):
            started: dict[str, Any] = {"suite": suite, "tasks": list(self._tasks), "try": try_number}
            runner.append("eval_started", step=step, **started)
            for note in [*self._remarks, *self._plan.notes]:
                print(note, file=sys.stderr, flush=True)
            self._run_tasks()
            records |= {number: self._combine(number, before) for number, before in records.items()}
        task_runner.keep_continuations(runner)  # last: it must not cost a score
        for number, record in records.items():
            assert record is not None
            kept = {key: record[key] for key in ("suite", "scores", "skipped")}
            fields = {**kept, "chosen": self._is_chosen, "contract": str(number)}
            wall_s = round(time.monotonic() - began_s, 3)  # includes loading, tasks and texts
            runner.append("eval_finished", once=True, wall_s=wall_s, step=step, **fields)
        return [runner.results.folder(number) / RESULTS for number in self._numbers]

    def _is_complete(self, records: dict[int, dict[str, Any] | None]) -> bool:
        """Whether the stored results have every task and group, except tasks that still can't run here."""
        skipped = {name for record in records.values() if record for name in record["skipped"]} & self._tasks.keys()
        if skipped and can_run_code(self._runner.config.eval):
            return False
        skipped |= {figure.group.name for figure in self._plan.figures if skipped & set(figure.group.tasks)}
        return all(
            name in skipped or ((record := records[number]) is not None and record["contracts"].get(name) == contract)
            for name, (contract, number) in self._runner.contracts.items()
        )

    def _run_tasks(self) -> None:
        for name, task in self._tasks.items():
            record = self._runner.stored(name) or self._runner.run(name, task)
            if record is None:
                continue
            self._runner.append_of(name, "eval_task_finished", once=True, scores=record["scores"])
            print(_summary(name, record), file=sys.stderr, flush=True)

    def _combine(self, number: int, before: dict[str, Any] | None) -> dict[str, Any]:
        runner = self._runner
        skipped = {name: why for name, why in runner.skipped.items() if runner.contracts[name][1] == number}
        return runner.results.combine(
            number,
            before,
            skipped,
            self._plan.notes,
            milestone_tokens=runner.subject.milestone_tokens,
            suite=runner.config.eval.suite,
        )


def _summary(name: str, record: dict[str, Any]) -> str:
    values = ", ".join(
        f"{score['metric']} {score['value']:.4g}" + (f" ± {score['stderr']:.2g}" if score["stderr"] is not None else "")
        for score in record["scores"].values()
    )
    return f"{name}: {values} ({record['wall_s']:.1f} s)"
