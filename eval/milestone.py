"""One evaluation, from start to results; read ``evaluate`` from top to bottom.

Everything is kept as soon as it is known: a task that has been scored is not run again by the next try, a generated
answer is not asked for again, and results.json is written last. One process at a time evaluates a milestone. What a
score is, and how it is measured, is other modules' business.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.load import load
from conf.schema import Config
from eval import answers, code, contract, harness, model, plan, runners, sandbox, scores, suites, validation
from hlatctl.run import contract as contracts
from hlatctl.run import files
from hlatctl.run.journal import JournalWriter, eval_writer
from hlatctl.run.lease import Holder, hold
from hlatctl.run.paths import RunPaths

RESULTS = "results.json"
#: Scores, the harness's metrics, and the samples to keep.
_Outcome = tuple[scores.Scores, harness.Metrics, list[dict[str, Any]]]
_LEASE_POLL_S = 0.5
_PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is evaluated.

    Args:
        run: the run directory that the results go to.
        milestone_tokens: tokens that the milestone is named after; 0 for a model from elsewhere.
        step: optimizer step of the checkpoint.
        model_folder: the checkpoint as a Hugging Face folder.
        weights: names the weights, such as a manifest's checksum; what was kept of other weights is measured again.
        from_elsewhere: the model is no run's, so that there is no held-out text.
    """

    run: RunPaths
    milestone_tokens: int
    step: int
    model_folder: Path
    weights: str = ""
    from_elsewhere: bool = False


@dataclass
class _Milestone:
    """What the tasks of one evaluation share."""

    config: Config
    subject: Subject
    held_out: Path | None
    plan: plan.Plan
    contract: contracts.Fields
    loaded: Callable[[], model.Loaded]
    lm: Callable[[], answers.Remembering]
    scratch: Path
    folder: Path = Path()
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def about(self) -> dict[str, Any]:
        """What every event says."""
        return {"milestone_tokens": self.subject.milestone_tokens, "contract": contracts.of_tasks(self.contract)}

    def kept_as(self, task: str | None) -> dict[str, Any]:
        """What kept results must say of themselves to be this evaluation's.

        Args:
            task: whose they are; None: all of them, which depend on both contracts.
        """
        of_tasks, of_text = contracts.of_tasks(self.contract), contracts.of_validation(self.contract)
        subject = {"step": self.subject.step, "weights": self.subject.weights}
        if task is None:
            return {**subject, "contract": of_tasks, "validation_contract": of_text}
        return {**subject, "contract": of_text if task == suites.VALIDATION else of_tasks}


def evaluate(
    subject: Subject, *, config: Config | None = None, new_contract: bool = False, try_number: int = 1
) -> Path:
    """Judge one exported checkpoint and return the path of its results.json.

    Does nothing if the results are there already, and only what is missing if a former try was cut off. Where another
    process evaluates the same milestone, waits until that is done or dead.

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
    with tempfile.TemporaryDirectory(prefix="hlatctl-eval-") as folder:
        scratch = Path(folder)
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


def _evaluate(this: _Milestone, journal: JournalWriter, try_number: int) -> Path:
    path, subject = this.folder / RESULTS, this.subject
    record = _read_kept(this, journal, path, None)
    if record is None:
        model.check_folder(subject.model_folder)
        tried: dict[str, Any] = {"try": try_number}
        journal.append("eval_started", step=subject.step, suite=this.config.eval.suite, tasks=_names(this), **tried,
                       **this.about)  # fmt: skip
        for note in this.plan.notes:
            print(note, file=sys.stderr, flush=True)
        record = _run_tasks(this, journal)
    _append_once(journal, "eval_finished", step=subject.step, suite=record["suite"], scores=record["scores"],
                 skipped=record["skipped"], wall_s=record["wall_s"], **this.about)  # fmt: skip
    return path


def _prepare(subject: Subject, config: Config, made: plan.Plan, scratch: Path) -> _Milestone:
    runners.check(config.eval.runner)
    contract.package_versions()  # before anything else imports them
    unsandboxed = code.without_sandbox(config.eval.code) if any(t.judge == "human_eval" for t in made.tasks) else None
    made = replace(made, notes=[*made.notes, *([unsandboxed] if unsandboxed else [])])
    text = validation.held_out(subject.run, config, from_elsewhere=subject.from_elsewhere) if made.validation else None
    folder, context = subject.model_folder, config.train.seq_len
    loaded = _once(lambda: model.load(folder, seq_len=context, device=config.backend.device))
    request = runners.Request(folder=folder, loaded=loaded, max_length=context,
                              batch_size=config.eval.batch_size, seed=config.seed)  # fmt: skip

    def lm() -> answers.Remembering:
        made_lm = runners.make(config.eval.runner, request)
        return answers.Remembering(made_lm, batch_size=config.eval.batch_size, seed=config.seed)

    return _Milestone(
        config=config, subject=subject, held_out=text, plan=replace(made, validation=text is not None),
        contract=contract.make(config, made, text, scratch), loaded=loaded, lm=_once(lm), scratch=scratch,
    )  # fmt: skip


def _names(this: _Milestone) -> list[str]:
    return [*([suites.VALIDATION] if this.plan.validation else []), *(task.name for task in this.plan.tasks)]


def _run_tasks(this: _Milestone, journal: JournalWriter) -> dict[str, Any]:
    """Score every task, keeping each as soon as it is done; write and return results.json."""
    started = time.monotonic()
    earlier_s = 0.0
    found: dict[str, Any] = {}
    metrics: dict[str, harness.Metrics] = {}
    validated: list[str | suites.Task] = [suites.VALIDATION] if this.plan.validation else []
    for task in [*validated, *this.plan.tasks]:
        name = task.name if isinstance(task, suites.Task) else task
        kept = this.folder / "tasks" / f"{name}.json"
        record = _read_kept(this, journal, kept, name)
        if record is None:
            record = _run_task(this, journal, task, kept)
            if record is None:
                continue
        else:
            earlier_s += record["wall_s"]
        found.update(record["scores"])
        metrics[name] = record["metrics"]
        _append_once(journal, "eval_task_finished", task=name, scores=record["scores"], **this.about)
        print(_line(name, record), file=sys.stderr, flush=True)
    for figure in this.plan.figures:
        found.update(scores.to_json(harness.figure(figure, metrics)))
    return scores.write_results(
        this.folder / RESULTS, kept_as=this.kept_as(None), milestone_tokens=this.subject.milestone_tokens,
        suite=this.config.eval.suite, versions=this.contract["versions"], scores=found, skipped=this.skipped,
        notes=this.plan.notes, wall_s=round(earlier_s + time.monotonic() - started, 3),
    )  # fmt: skip


def _read_kept(this: _Milestone, journal: JournalWriter, path: Path, task: str | None) -> dict[str, Any] | None:
    """What was kept of this evaluation, or None; a damaged file is told of, and what it held is measured again."""
    try:
        return scores.read_results(path, kept_as=this.kept_as(task))
    except scores.DamagedResultsError as error:
        message = f"{error}; measured again"
        print(message, file=sys.stderr, flush=True)
        journal.append("eval_rejected", path=str(path), message=message, **this.about)
        return None


def _run_task(this: _Milestone, journal: JournalWriter, task: str | suites.Task, kept: Path) -> dict[str, Any] | None:
    """Score one task and keep its samples and scores; None, and an entry in ``skipped``, if it can't be run here."""
    started = time.monotonic()
    metrics: harness.Metrics = {}
    name = task.name if isinstance(task, suites.Task) else task
    journal.append("eval_task_started", task=name, **this.about)
    own: dict[str, Any] = {}
    if isinstance(task, str):
        assert this.held_out is not None
        found = validation.evaluate(this.loaded(), this.held_out, max_tokens=this.config.eval.validation_tokens)
        own = {"contract": this.kept_as(name)["contract"]}
    else:
        outcome = _run_code_task(this, journal, task) if task.judge == "human_eval" else _run_language_task(
            this, journal, task)  # fmt: skip
        if outcome is None:
            return None
        found, metrics, samples = outcome
        lines = (json.dumps(sample, default=str) + "\n" for sample in samples)
        files.write_text(this.folder / f"samples-{name}.jsonl", "".join(lines))
    scores.check_finite(found)
    record = scores.write_results(
        kept, kept_as=this.kept_as(name), metrics=metrics, wall_s=round(time.monotonic() - started, 3),
        scores={title: {**score, **own} for title, score in scores.to_json(found).items()},
    )  # fmt: skip
    _answers_file(this, name).unlink(missing_ok=True)
    return record


def _answers_file(this: _Milestone, task: str) -> Path:
    return this.folder / "answers" / f"{task}.jsonl"


def _begin(this: _Milestone, journal: JournalWriter, task: suites.Task) -> answers.Remembering:
    """The model, told which task is next: where its answers are kept, and who watches."""
    lm, last_s = this.lm(), 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _PROGRESS_EVERY_S:
            last_s = now_s
            journal.append("eval_progress", task=task.name, done=done, total=total, **this.about)

    lm.begin(_answers_file(this, task.name), json.dumps(this.kept_as(task.name)), progress)
    return lm


def _run_language_task(this: _Milestone, journal: JournalWriter, task: suites.Task) -> _Outcome:
    lm, limit = _begin(this, journal, task), this.config.eval.limit
    result = harness.run(lm, task, this.scratch, seed=this.config.seed, limit=limit)
    # Prompts are many times the datasets' size; their hashes stay, and the datasets are there to make them again.
    samples = [{k: v for k, v in sample.items() if k not in ("doc", "arguments")} for sample in result.samples]
    return result.scores, result.metrics, samples


def _run_code_task(this: _Milestone, journal: JournalWriter, task: suites.Task) -> _Outcome | None:
    reason = sandbox.why_unavailable()
    if reason and not this.config.eval.code.allow_unsandboxed:
        this.skipped[task.name] = reason
        print(f"{task.name}: skipped, {reason}", file=sys.stderr, flush=True)
        return None
    wanted = this.config.eval
    programs = code.generate(
        _begin(this, journal, task), task, this.scratch, samples=wanted.code.samples_per_problem, limit=wanted.limit,
        seed=this.config.seed,
    )  # fmt: skip
    judged = code.judge(code.read_jsonl(task.items), programs, wanted.code)
    return code.pass_at_k(task.name, judged), {}, judged


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


def _line(name: str, record: dict[str, Any]) -> str:
    values = ", ".join(
        f"{score['metric']} {score['value']:.4g}" + (f" ± {score['stderr']:.2g}" if score["stderr"] is not None else "")
        for score in record["scores"].values()
    )
    return f"{name}: {values} ({record['wall_s']:.1f} s)"
