"""One task of an evaluation: run, its answers and scores kept, its progress told.

Which tasks there are, in which order, and what is made of their scores is ``eval.milestone``'s business.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.schema import Config, EvalConfig
from eval import answers, code, harness, model, plan, sandbox, scores, suites, validation
from hlatctl.run import contract as contracts
from hlatctl.run import files
from hlatctl.run.journal import JournalWriter
from hlatctl.run.paths import RunPaths

#: Scores, the harness's metrics, and the samples to keep.
_Outcome = tuple[scores.Scores, harness.Metrics, list[dict[str, Any]]]
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
class Evaluation:
    """What the tasks of one evaluation share.

    Args:
        folder: where its results go.
        loaded, lm: the model, loaded when it is first asked for.
        skipped: tasks that can't be run here, and why.
    """

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


def read_kept(this: Evaluation, journal: JournalWriter, path: Path, task: str | None) -> dict[str, Any] | None:
    """What was kept of this evaluation, or None; a damaged file is told of, and what it held is measured again."""
    try:
        return scores.read_results(path, kept_as=this.kept_as(task))
    except scores.DamagedResultsError as error:
        message = f"{error}; measured again"
        print(message, file=sys.stderr, flush=True)
        journal.append("eval_rejected", path=str(path), message=message, **this.about)
        return None


def run_task(this: Evaluation, journal: JournalWriter, task: str | suites.Task, kept: Path) -> dict[str, Any] | None:
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
        outcome = (
            _run_code_task(this, journal, task)
            if task.judge == "human_eval"
            else _run_language_task(this, journal, task)
        )
        if outcome is None:
            return None
        found, metrics, samples = outcome
        lines = (json.dumps(sample, default=str) + "\n" for sample in samples)
        files.write_text(this.folder / f"samples-{name}.jsonl", "".join(lines))
    scores.check_finite(found)
    record = scores.write_results(
        kept,
        kept_as=this.kept_as(name),
        metrics=metrics,
        wall_s=round(time.monotonic() - started, 3),
        scores={title: {**score, **own} for title, score in scores.to_json(found).items()},
    )
    _answers_file(this, name).unlink(missing_ok=True)
    return record


def can_run_code(wanted: EvalConfig) -> bool:
    """Whether generated programs can be judged here: the only tasks that are ever skipped."""
    return wanted.code.allow_unsandboxed or sandbox.why_unavailable() is None


def _answers_file(this: Evaluation, task: str) -> Path:
    return this.folder / "answers" / f"{task}.jsonl"


def _begin(this: Evaluation, journal: JournalWriter, task: suites.Task) -> answers.Remembering:
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


def _run_language_task(this: Evaluation, journal: JournalWriter, task: suites.Task) -> _Outcome:
    lm, limit = _begin(this, journal, task), this.config.eval.limit
    result = harness.run(lm, task, this.scratch, seed=this.config.seed, limit=limit)
    # Prompts are many times the datasets' size; their hashes stay, and the datasets are there to make them again.
    samples = [{k: v for k, v in sample.items() if k not in ("doc", "arguments")} for sample in result.samples]
    return result.scores, result.metrics, samples


def _run_code_task(this: Evaluation, journal: JournalWriter, task: suites.Task) -> _Outcome | None:
    if not can_run_code(this.config.eval):
        reason = this.skipped[task.name] = str(sandbox.why_unavailable())
        print(f"{task.name}: skipped, {reason}", file=sys.stderr, flush=True)
        return None
    wanted = this.config.eval
    programs = code.generate(
        _begin(this, journal, task),
        task,
        this.scratch,
        samples=wanted.code.samples_per_problem,
        limit=wanted.limit,
        seed=this.config.seed,
    )
    judged = code.judge(code.read_jsonl(task.items), programs, wanted.code)
    return code.pass_at_k(task.name, judged), {}, judged


def in_words(name: str, record: dict[str, Any]) -> str:
    """A task's scores as a line."""
    values = ", ".join(
        f"{score['metric']} {score['value']:.4g}" + (f" ± {score['stderr']:.2g}" if score["stderr"] is not None else "")
        for score in record["scores"].values()
    )
    return f"{name}: {values} ({record['wall_s']:.1f} s)"
