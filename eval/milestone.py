"""One evaluation, from start to results; read ``evaluate`` from top to bottom.

Everything is kept as soon as it is known: a task that has been scored is not run again by the next try, a generated
answer is not asked for again, and results.json is written last. One process at a time evaluates a milestone. What a
score is, and how it is measured, is other modules' business.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.load import load
from conf.schema import Config
from eval import answers, code, contract, harness, model, plan, runners, scores, suites, validation
from eval.tasks import Evaluation, Subject, can_run_code, in_words, read_kept, run_task
from hlatctl.run import contract as contracts
from hlatctl.run.journal import JournalWriter, eval_writer
from hlatctl.run.lease import Holder, hold
from hlatctl.run.scratch import private_folder

RESULTS = "results.json"
_LEASE_POLL_S = 0.5


def evaluate(
    subject: Subject, *, config: Config | None = None, new_contract: bool = False, try_number: int = 1
) -> Path:
    """Judge one exported checkpoint and return the path of its results.json.

    Does nothing if the results are there already, and only what is missing if a former try was cut off or had to leave
    out what can be run now. Where another process evaluates the same milestone, waits until that is done or dead.

    Args:
        subject: what is evaluated; ``config.yaml`` and ``dataset.json`` of its run are read.
        config: in place of the run's own.
        new_contract: measure under another contract than the run's former evaluations, apart from them.
        try_number: 1 for the first try of this milestone.

    Raises:
        ConfigError: unknown suite or task.
        DataError: no held-out text, or a dataset of the suite is missing.
        DependencyError: a package is missing.
        EvaluationError: the model can't be judged, or another contract was frozen.
    """
    config = config or load(subject.run.config)
    with private_folder("eval") as own:
        scratch = own.path
        model.settle_environment(scratch, offline=not plan.uses_network(config.eval))
        this = _prepare(subject, config, plan.make(config.eval, scratch), scratch)
        with hold(subject.run.eval_lease(subject.milestone_tokens), _patience()):
            place = contracts.admit(subject.run, this.contract, new=new_contract)
            this.folder = subject.run.eval(subject.milestone_tokens) / contracts.results_folder(this.contract, place)
            with JournalWriter(subject.run, eval_writer(subject.milestone_tokens)) as journal:
                return _evaluate(this, journal, try_number)


def _patience() -> Callable[[Holder], None]:
    """Waits for whoever has a lease, and says so once for each holder."""
    told: set[Holder] = set()

    def wait(holder: Holder) -> None:
        if holder.pid and holder not in told:
            told.add(holder)
            since = datetime.fromtimestamp(holder.since_unix_s, UTC).strftime("%H:%M:%S")
            print(f"waiting: {holder} evaluates this milestone since {since} UTC", file=sys.stderr, flush=True)
        time.sleep(_LEASE_POLL_S)

    return wait


def _evaluate(this: Evaluation, journal: JournalWriter, try_number: int) -> Path:
    path, subject = this.folder / RESULTS, this.subject
    record = read_kept(this, journal, path, None)
    if record is None or (record["skipped"] and can_run_code(this.config.eval)):
        tried: dict[str, Any] = {"try": try_number}
        journal.append(
            "eval_started", step=subject.step, suite=this.config.eval.suite, tasks=_names(this), **tried, **this.about
        )
        for note in this.plan.notes:
            print(note, file=sys.stderr, flush=True)
        record = _run_tasks(this, journal)
    _append_once(
        journal,
        "eval_finished",
        step=subject.step,
        suite=record["suite"],
        scores=record["scores"],
        skipped=record["skipped"],
        wall_s=record["wall_s"],
        **this.about,
    )
    return path


def _prepare(subject: Subject, config: Config, made: plan.Plan, scratch: Path) -> Evaluation:
    runners.check(config.eval.runner)
    contract.package_versions()  # before anything else imports them
    model.check_folder(subject.model_folder)
    unsandboxed = code.without_sandbox(config.eval.code) if any(t.judge == "human_eval" for t in made.tasks) else None
    made = replace(made, notes=[*made.notes, *([unsandboxed] if unsandboxed else [])])
    text = validation.held_out(subject.run, config, from_elsewhere=subject.from_elsewhere) if made.validation else None
    folder, context = subject.model_folder, config.train.seq_len
    loaded = _once(lambda: model.load(folder, seq_len=context, device=config.backend.device))
    request = runners.Request(
        folder=folder,
        loaded=loaded,
        max_length=context,
        batch_size=config.eval.batch_size,
        seed=config.seed,
        tensor_parallel_size=config.eval.tensor_parallel_size,
    )

    def lm() -> answers.Remembering:
        made_lm = runners.make(config.eval.runner, request)
        return answers.Remembering(made_lm, batch_size=config.eval.batch_size, seed=config.seed)

    return Evaluation(
        config=config,
        subject=subject,
        held_out=text,
        plan=replace(made, validation=text is not None),
        contract=contract.make(config, made, text, scratch, folder=folder, from_elsewhere=subject.from_elsewhere),
        loaded=loaded,
        lm=_once(lm),
        scratch=scratch,
    )


def _names(this: Evaluation) -> list[str]:
    return [*([suites.VALIDATION] if this.plan.validation else []), *(task.name for task in this.plan.tasks)]


def _run_tasks(this: Evaluation, journal: JournalWriter) -> dict[str, Any]:
    """Score every task, keeping each as soon as it is done; write and return results.json."""
    started = time.monotonic()
    earlier_s = 0.0
    found: dict[str, Any] = {}
    metrics: dict[str, harness.Metrics] = {}
    validated: list[str | suites.Task] = [suites.VALIDATION] if this.plan.validation else []
    for task in [*validated, *this.plan.tasks]:
        name = task.name if isinstance(task, suites.Task) else task
        kept = this.folder / "tasks" / f"{name}.json"
        record = read_kept(this, journal, kept, name)
        if record is None:
            record = run_task(this, journal, task, kept)
            if record is None:
                continue
        else:
            earlier_s += record["wall_s"]
        found.update(record["scores"])
        metrics[name] = record["metrics"]
        _append_once(journal, "eval_task_finished", task=name, scores=record["scores"], **this.about)
        print(in_words(name, record), file=sys.stderr, flush=True)
    for figure in this.plan.figures:
        found.update(scores.to_json(harness.figure(figure, metrics)))
    return scores.write_results(
        this.folder / RESULTS,
        kept_as=this.kept_as(None),
        milestone_tokens=this.subject.milestone_tokens,
        suite=this.config.eval.suite,
        versions=this.contract["versions"],
        scores=found,
        skipped=this.skipped,
        notes=this.plan.notes,
        wall_s=round(earlier_s + time.monotonic() - started, 3),
    )


def _append_once(journal: JournalWriter, kind: str, **fields: Any) -> None:
    """Journal an event unless this milestone's journal tells it already."""
    told = (event for event in journal.events() if event["kind"] == kind)
    if not any(fields.items() <= event.items() for event in told):
        journal.append(kind, durable=True, **fields)


def _once(make: Callable[[], Any]) -> Callable[[], Any]:
    """A function that makes a value when it is first asked for, and gives the same one ever after."""
    made: list[Any] = []

    def get() -> Any:
        if not made:
            made.append(make())
        return made[0]

    return get
