"""`hlatctl status`: shows the state of a run or a sweep. `hlatctl train` prints the same lines at the end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from hlatctl.cli.common import Json, RunOrSweepName, RunsDir, columns, find_run, find_sweep, print_json, say, write
from hlatctl.cli.drivers import job_rows, job_text
from hlatctl.driver_job import driver_job
from hlatctl.plan.pace import seconds_per_step, training_left_s
from hlatctl.report.eval_queue import (
    EvaluationQueue,
    evaluation_queue,
    forecast_text,
    task_forecast,
    tasks_text,
    waiting_text,
)
from hlatctl.report.run_view import RunView, view_run, view_sweep
from hlatctl.run import continuations
from hlatctl.run.evaluations import in_words, skipped_in_words
from hlatctl.run.labels import LabelState, noted
from hlatctl.run.pace import task_left_s
from hlatctl.run.paths import SweepPaths
from hlatctl.run.reader import INTERRUPTED
from hlatctl.run.runs import LATEST
from hlatctl.run.state import MilestoneState, RunState
from hlatctl.units import count, duration, host_names, number, one_line, queued, size, tags_text, utc, value_text


def queue_rows(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield the lines about milestones that are not evaluated. A run without a driver has no forecast."""
    queue = _queue(view)
    if queue is None:
        return
    if queue.waiting:
        yield "evaluation waits", waiting_text(queue)
    if view.ended:
        return
    if text := forecast_text(queue):
        yield "evaluation", text
    tasks = task_forecast(view.state, _running(view))
    if tasks and (text := tasks_text(tasks)):
        yield ("this evaluation" if queue.running else "next evaluation"), text


def queue_record(view: RunView) -> dict[str, Any] | None:
    """Return the queue and the times of tasks for `status --json`; None for a run without milestones."""
    queue = _queue(view)
    if queue is None:
        return None
    tasks = task_forecast(view.state, _running(view))
    return {**dataclasses.asdict(queue), "tasks": [dataclasses.asdict(task) for task in tasks]}


def _queue(view: RunView) -> EvaluationQueue | None:
    has_own = view.config is not None and not view.state.evaluates and bool(view.state.milestones)
    return evaluation_queue(view.state, view.config, time.time()) if has_own and view.config else None


def _running(view: RunView) -> MilestoneState | None:
    return next((m for _, m in sorted(view.state.milestones.items()) if m.progress), None)


#: Characters of a model's text that one line shows.
_TEXT_LENGTH = 100


def status_rows(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each fact about a run."""
    from hlatctl.report.numbers import origin_text
    from hlatctl.report.record import looks

    state = view.state
    yield "run", noted(view.run.run_id, simulated=state.simulated)
    yield from label_rows(state.labels)
    yield "folder", str(view.run.root)
    driver = view.driver_elsewhere or (f"process {view.driver_pid}" if view.driver_pid else "")
    yield "status", view.status + (f" ({driver})" if driver else "")
    if view.problem:
        yield "problem", view.problem
    yield from job_rows(view.run)
    if state.message:
        yield "message", state.message
    if state.created_unix_s:
        yield "created", utc(state.created_unix_s)
    if not view.ended and state.running_stages:
        yield "stage", ", ".join(state.running_stages)
    if state.evaluates:
        yield "model", state.evaluates
        if state.imported:
            yield "imported", origin_text(state.imported)
    else:
        yield from _training_rows(view)
    yield from _amendment_rows(state)
    yield from _attempt_rows(state)
    for look in looks(view.run, state):
        yield look.name, f"{look.text}: {view.run.root / look.folder}"
    if not view.ended:
        for name, job in state.queued.items():
            yield f"job {name}", f"{queued(job.reason, job.expected_start_unix_s)}, since {utc(job.since_unix_s)}"
    for milestone in sorted(state.milestones.values(), key=lambda milestone: milestone.milestone_tokens):
        at = f"at {count(milestone.milestone_tokens)}" if milestone.milestone_tokens else "scores"
        yield at, milestone.message or in_words(milestone.scores, with_noise=True) or milestone.status
        yield from ((f"{at}, note", line) for line in skipped_in_words(milestone.skipped))
        for other in milestone.others:
            beside = f"{at}, contract {other.contract[:8]}"
            yield beside, in_words(other.scores, with_noise=True)
            yield from ((f"{beside}, note", line) for line in skipped_in_words(other.skipped))
        if milestone.progress:
            yield f"{at}, now", evaluation_line(milestone)
    yield from queue_rows(view)
    yield from _text_rows(view)
    for warning in state.warnings:
        yield "warning", warning
    if (view.run.report / "index.html").is_file():
        yield "report", str(view.run.report / "index.html")


def label_rows(labels: LabelState) -> Iterator[tuple[str, str]]:
    """Yield the name, the tags and the newest note of a run or a sweep."""
    if labels.name:
        yield "name", labels.name
    if labels.tags:
        yield "tags", tags_text(labels.tags)
    if labels.notes:
        yield "note", labels.notes[-1].text


def evaluation_line(milestone: MilestoneState) -> str:
    """Return an evaluation's progress: its task, the answered requests and the time left."""
    progress = milestone.progress
    if progress is None:
        return milestone.status
    if progress.task not in progress.tasks:
        return "starting"
    parts = [f"{progress.task} (task {progress.tasks.index(progress.task) + 1} of {len(progress.tasks)})"]
    if progress.total:
        parts.append(f"{progress.done:,} of {progress.total:,} requests")
    if left_s := task_left_s(progress):
        parts.append(f"{duration(left_s)} left for this task")
    return " · ".join(parts)


def _training_rows(view: RunView) -> Iterator[tuple[str, str]]:
    if view.config and view.config.fork.run:
        yield "forked from", f"{view.config.fork.run} at step {view.config.fork.step}"
    state, last, total = view.state, view.state.last_step, view.total_steps
    done = f" of {total} ({100 * state.step // total} %)" if total else ""
    yield "step", f"{state.step}{done}, {count(state.tokens)} tokens"
    if view.config and (stage := view.config.stage_at(state.step + 1)):
        of = f"{stage.number} of {len(view.config.stages)}, steps {stage.after_step + 1} to {stage.last_step}"
        yield "training stage", f"{stage.name} ({of})"
    if last is None:
        return
    yield (
        "loss",
        f"{number(last, 'loss'):.4f}, gradient norm {number(last, 'grad_norm'):.3f}, lr {number(last, 'lr'):.2e}",
    )
    pace_s = seconds_per_step(state, view.config)
    if pace_s and view.config:
        speed = f"{count(view.config.during(state.step).tokens_per_step / pace_s)} tokens/s"
        left_s = training_left_s(state, view.config)
        yield "speed", speed + (f", {duration(left_s)} of training left" if left_s else "")
    if used := used_text(state):
        yield "uses", used
    yield from _forecast_rows(state)
    if state.checkpoints:
        yield "checkpoints", ", ".join(str(step) for step in state.checkpoints)


def _forecast_rows(state: RunState) -> Iterator[tuple[str, str]]:
    if state.forecast is None:
        return
    from hlatctl.report import ladder

    yield "ladder", state.forecast.ladder
    yield from ladder.facts(state.forecast, ladder.result_of_run(state))


def used_text(state: RunState) -> str:
    """Return rank 0's device usage at the newest step, as far as known."""
    used = state.used
    parts = [
        f"MFU {number(used, 'mfu'):.1%}" if "mfu" in used else "",
        f"memory {size(number(used, 'memory_bytes'))}" if "memory_bytes" in used else "",
        f"at most {size(number(used, 'peak_memory_bytes'))}" if "peak_memory_bytes" in used else "",
    ]
    return ", ".join(filter(None, parts))


def _amendment_rows(state: RunState) -> Iterator[tuple[str, str]]:
    waiting = [a for a in state.amendments if a.applied_step is None]
    for amendment in sorted([*state.amendments[-1:], *waiting[:-1]], key=lambda a: a.number):
        changes = (f"{key} {value_text(old)} -> {value_text(new)}" for key, (old, new) in amendment.changes.items())
        yield f"amendment {amendment.number}", f"{amendment.begins}: {', '.join(changes)}"


def _attempt_rows(state: RunState) -> Iterator[tuple[str, str]]:
    for attempt in state.attempts:
        on = f" on {host_names(attempt.hosts)}" if attempt.hosts else ""
        why = f" ({attempt.why})" if attempt.why else ""
        has_begun, has_ended = attempt.resumed_from_step is not None, attempt.ended_unix_s is not None
        begun = f"from step {attempt.resumed_from_step}{on}" if has_begun else f"has not begun to train{on}"
        ended = f"{f' to {attempt.last_step}' * has_begun}: {attempt.cause}" if has_ended else ", not ended" * has_begun
        yield f"attempt {attempt.number}", begun + ended + why


def _text_rows(view: RunView) -> Iterator[tuple[str, str]]:
    kept = continuations.newest(view.run, view.state.milestones)
    if kept and kept.continuations:
        first = kept.continuations[0]
        yield (
            f"text at {count(kept.milestone_tokens)}",
            one_line(" ".join(f"{first.prompt} → {first.text}".split())[:_TEXT_LENGTH]),
        )


def end_lines(view: RunView) -> list[str]:
    """Return the lines of a finished run's summary: the facts that its report begins with, and what to do next."""
    rows = list(_end_rows(view))
    width = max(len(name) for name, _ in rows)
    title = noted(f"{view.run.run_id}: {view.status}", simulated=view.state.simulated)
    return ["", title, *(f"  {name:<{width}}  {text}" for name, text in rows)]


def _end_rows(view: RunView) -> Iterator[tuple[str, str]]:
    from hlatctl.report.record import read_record
    from hlatctl.report.summary import headline

    state, run_id = view.state, view.run.run_id
    if view.config:
        yield from headline(read_record(view.run, view.config))
    newest = max(state.milestones.values(), key=lambda milestone: milestone.milestone_tokens, default=None)
    if newest:
        yield from (("skipped", line) for line in skipped_in_words(newest.skipped))
    if newest and newest.scores:
        yield "all scores", f"hlatctl compare {run_id} --baselines hlat"
    if state.restarts:
        yield "restarts", str(state.restarts)
    page = view.run.report / "index.html"
    if page.is_file():
        yield "report", str(page)
    yield from (("text", text) for _, text in _text_rows(view))
    talk = f"hlatctl generate {run_id} · " if state.checkpoints and not state.simulated else ""
    yield "next", f"{talk}hlatctl show {run_id} · hlatctl ui"


#: Reason to resume, by status.
_RESUMABLE = {
    "created": "it has no driver",
    INTERRUPTED: "its driver is not running",
    "stopped": "it was stopped",
    "failed": "fix the cause first",
}


def status(run: RunOrSweepName = LATEST, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Show the state of a run or a sweep.

    Shows a run's stage, step, loss, speed, attempts and milestones, a sweep's arms, best first, or a ladder's rungs
    with its forecast.
    """
    if swept := find_sweep(run, runs_dir):
        _sweep_status(swept, as_json=as_json)
        return
    view = view_run(find_run(run, runs_dir))
    if as_json:
        print_json(_record(view))
        return
    write(columns([[name, text] for name, text in status_rows(view)]))
    if view.status in _RESUMABLE and not driver_job(view.run.driver_job):
        say(f"hint: `hlatctl resume {view.run.run_id}` continues the run ({_RESUMABLE[view.status]})")


def _record(view: RunView) -> dict[str, Any]:
    state, page = view.state, view.run.report / "index.html"
    return {
        "run_id": view.run.run_id,
        "path": str(view.run.root),
        "status": view.status,
        "head_pid": view.driver_pid,
        "head_elsewhere": view.driver_elsewhere or None,
        "head_job": job_text(view.run.driver_job) or None,
        "evaluator_job": job_text(view.run.evaluator_job) or None,
        "simulated": state.simulated,
        "step": state.step,
        "total_steps": view.total_steps,
        "tokens": state.tokens,
        "training_stage": stage.name if view.config and (stage := view.config.stage_at(state.step + 1)) else None,
        "last_step": state.last_step,
        "used": state.used,
        "validation_loss": state.validation_loss,
        "checkpoints": state.checkpoints,
        "stages": [dataclasses.asdict(stage) for stage in state.stages.values()],
        "attempts": [dataclasses.asdict(attempt) for attempt in state.attempts],
        "milestones": [dataclasses.asdict(milestone) for milestone in state.milestones.values()],
        "evaluation_queue": queue_record(view),
        "gradient_spikes": len(state.spikes),
        "warnings": state.warnings,
        "message": state.message or view.problem,
        "report": str(page) if page.is_file() else None,
    }


def _sweep_status(sweep: SweepPaths, *, as_json: bool) -> None:
    from hlatctl.report import ladder
    from hlatctl.report import sweep as report

    state, pid = view_sweep(sweep)
    if as_json:
        driven = {"head_pid": pid, "head_job": job_text(sweep.driver_job) or None}
        print_json({**dataclasses.asdict(state), "path": str(sweep.root), **driven})
        return
    labels = [list(fact) for fact in label_rows(state.labels)]
    labels += [list(row) for row in job_rows(sweep)]
    write(columns([*labels, *(list(fact) for fact in report.facts(state))]))
    if state.trials:
        write("\n" + columns([report.header(state), *report.rows(state)]))
    if state.forecast and state.forecast.scores:
        head, rows = ladder.scores(state.forecast)
        write("\n" + columns([head, *rows]))
    if state.forecast and state.arms == state.target:
        say(f"hint: `hlatctl ladder --target {sweep.run_id}` trains the target")
    if pid is None and state.status in _RESUMABLE and not driver_job(sweep.driver_job):
        say(f"hint: `hlatctl resume {sweep.run_id}` continues the {state.noun} ({_RESUMABLE[state.status]})")
