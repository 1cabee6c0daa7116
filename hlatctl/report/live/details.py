"""What the live page shows of one run except its curves, such as the end of a log, and comparisons of several runs."""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from conf.load import flatten
from conf.of_run import of_run
from conf.schema import Config
from conf.sizes import parameters
from hlatctl.driver_job import driver_job
from hlatctl.report import baselines, compare_tables
from hlatctl.report.compare import RUN, Cell, Comparison, RunScores, compare, evaluated_milestone, read_scores
from hlatctl.report.eval_queue import evaluation_queue, forecast_text, waiting_text
from hlatctl.report.goodput import facts, measure_goodput
from hlatctl.report.live.index import Kept, OpenRun, json_row
from hlatctl.report.numbers import attempts_of
from hlatctl.report.paired import compare_milestones
from hlatctl.report.run_list import RunRow, row_of
from hlatctl.report.run_view import RunView, view_run
from hlatctl.report.summary import table as markdown_table
from hlatctl.run import continuations, rank_output
from hlatctl.run.errors import ConfigError, HlatctlError, suggest
from hlatctl.run.evaluations import headlines
from hlatctl.run.files import reading
from hlatctl.run.fold import read_state
from hlatctl.run.journal import Event
from hlatctl.run.lease import driver, holder, is_held
from hlatctl.run.paths import RunPaths, attempt_of
from hlatctl.run.state import AmendmentState, AttemptState, MilestoneState, RunState
from hlatctl.units import count, number, value_text

#: Newest warnings that are shown; a run has thousands.
MOST_WARNINGS = 200
#: Newest series of damaged lines that are shown.
_MOST_DAMAGES = 5
#: Newest bars of a lane in the timeline.
_MOST_BARS = 500
#: Milestones whose continued prompts are shown, the newest ones.
_MOST_SAMPLED = 20
#: Goodput is computed again after this many times the time that it took.
_KEPT_SHARE = 10.0
_WARNINGS = (
    "warning",
    "alarm",
    "straggler",
    "corruption_suspected",
    "environment_collision",
    "tracking_lost",
    "eval_rejected",
)


def details(opened: OpenRun) -> dict[str, Any]:
    """Return everything that the page shows of a run. A damaged run has a row and empty lists."""
    with opened.lock:
        view = opened.refresh()
        state, config = view.state, view.config
        events = opened.events if view.status != "damaged" else []
        attempts = _attempts(state, config)
        return {
            "row": json_row(row_of(view), view),
            "message": view.problem or state.message,
            "problem": view.problem or None,
            "damage": {"count": len(state.damages), "lines": state.damages[-_MOST_DAMAGES:]},
            "version": opened.version,
            "driver": _driver(view),
            "evaluator": _evaluator(view.run),
            **_model(config),
            "milestones": [_milestone(milestone) for _, milestone in sorted(state.milestones.items())],
            "timeline": _timeline(state, events, attempts),
            "attempts": attempts,
            "nodes": _nodes(state.attempt),
            "evaluations": _evaluations(view.run, state),
            "evaluation_queue": _evaluation_queue(view),
            "samples": _samples(view.run, sorted(state.milestones)[-_MOST_SAMPLED:]),
            "notes": [{"unix_s": n.time_unix_s, "text": n.text, "by": n.by} for n in state.labels.notes],
            "tags": state.labels.tags,
            "name": state.labels.name,
            "training_stages": [
                {"name": stage.name, "from_step": stage.after_step + 1, "to_step": stage.last_step}
                for stage in (config.stages if config else ())
            ],
            "amendments": [_amendment(amendment) for amendment in state.amendments],
            "warnings": _warnings(events),
            "goodput": _goodput(opened, view, events),
            "config": flatten(config) if config else {},
            "changed": _changed(config) if config else [],
        }


@cache
def _defaults() -> dict[str, Any]:
    return flatten(Config())


def _changed(config: Config) -> list[str]:
    """Return the keys whose values are not the defaults."""
    return [key for key, value in flatten(config).items() if value != _defaults().get(key, _MISSING)]


def _driver(view: RunView) -> dict[str, Any] | None:
    held_by = driver(view.run)
    return {"pid": held_by.pid, "host": held_by.host} if held_by else None


def _evaluator(run: RunPaths) -> dict[str, Any] | None:
    """Return which process evaluates a run alongside its driver, and whether a job does that; None if neither does."""
    held, job = holder(run.evaluator_lock), driver_job(run.evaluator_job)
    return {"process": str(held) if held else None, "is_job": job is not None} if held or job else None


def _model(config: Config | None) -> dict[str, Any]:
    if config is None:
        return {"model": "", "parameters": None, "hardware": ""}
    cluster, backend = config.cluster, config.backend
    plural = "s" * (cluster.nodes > 1)
    hardware = f"{cluster.nodes} node{plural} with {cluster.processes_per_node} x {backend.device} ({backend.name})"
    model, counts = config.model, parameters(config.model)
    shape = f"{model.num_layers} layers, hidden size {model.hidden_size}, {model.num_heads} heads"
    if model.module is not None:
        shape = f"{model.module} {model.flavor}"
    if counts.active != counts.total:
        shape += f", {count(counts.active)} active parameters"
    return {"model": shape, "parameters": counts.total, "hardware": f"{hardware}, {cluster.launcher}"}


def _milestone(milestone: MilestoneState) -> dict[str, Any]:
    shown = headlines(milestone.scores)
    scores = {
        name: {
            "value": number(score, "value"),
            "stderr": number(score, "stderr"),
            "n": score.get("n"),
            "chance": number(score, "chance"),
            "headline": name in shown,
        }
        for name, score in milestone.scores.items()
    }
    return {
        "tokens": milestone.milestone_tokens,
        "status": milestone.status,
        "step": milestone.step,
        "message": milestone.message,
        "contract": milestone.contract,
        "scores": scores,
    }


#: The ends of what a timeline shows, and the status that they mean.
_ENDS = {
    "stage_finished": "finished",
    "stage_skipped": "skipped",
    "stage_failed": "failed",
    "eval_finished": "finished",
    "eval_failed": "failed",
    "eval_stopped": "stopped",
}


def _timeline(state: RunState, events: Iterable[Event], attempts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a lane for each stage, for evaluation and for the attempts, with a bar for each time that it ran."""
    lanes: dict[str, list[dict[str, Any]]] = {name: [] for name in state.stages}
    for event in events:
        kind = event["kind"]
        if kind not in _ENDS and kind not in ("stage_started", "eval_started"):
            continue
        name = str(event.get("stage", "")) if kind.startswith("stage") else "evaluation"
        bars, at = lanes.setdefault(name, []), event["time_unix_s"]
        of = "" if name != "evaluation" else f"{count(int(event.get('milestone_tokens') or 0))} tokens"
        running = next((bar for bar in reversed(bars) if bar["ended_unix_s"] is None and bar["of"] == of), None)
        if kind not in _ENDS or running is None:
            running = {"status": "running", "started_unix_s": at, "ended_unix_s": None, "message": "", "of": of}
            bars.append(running)
        if kind in _ENDS:
            says = str(event.get("why") or event.get("message") or "")
            running |= {"status": _ENDS[kind], "ended_unix_s": at, "message": says}
    for attempt in attempts:
        lanes.setdefault("training", []).append(
            {
                "status": "running" if attempt["ended_unix_s"] is None else "ended",
                "started_unix_s": attempt["started_unix_s"],
                "ended_unix_s": attempt["ended_unix_s"],
                "message": attempt["cause"],
                "of": f"attempt {attempt['attempt']}",
            }
        )
    found = [{"name": name, "bars": bars[-_MOST_BARS:], "count": len(bars)} for name, bars in lanes.items() if bars]
    return sorted(found, key=lambda lane: lane["bars"][0]["started_unix_s"])


def _attempts(state: RunState, config: Config | None) -> list[dict[str, Any]]:
    if config is None:
        return []
    return [
        {
            "attempt": attempt.number,
            "started_unix_s": attempt.started_unix_s,
            "ended_unix_s": full.ended_unix_s,
            "from_step": attempt.from_step,
            "to_step": attempt.last_step,
            "hosts": full.hosts,
            "blamed_hosts": full.blamed_hosts,
            "cause": attempt.cause,
            "evidence": attempt.evidence,
            "decision": attempt.decision,
            "why": attempt.why,
            "lost_steps": attempt.lost_steps,
            "lost_tokens": config.tokens_at(attempt.last_step)
            - config.tokens_at(attempt.last_step - attempt.lost_steps),
            "recovery": full.recovery,
        }
        for attempt, full in zip(attempts_of(state, config), state.attempts, strict=True)
    ]


def _nodes(attempt: AttemptState | None) -> list[dict[str, Any]]:
    if attempt is None:
        return []
    running = "training" if attempt.ended_unix_s is None else "released"
    slow = {str(event.get("host", "")): str(event.get("message", "")) for event in attempt.stragglers}
    found = dict.fromkeys(attempt.hosts, (running, ""))
    found |= {host: ("slow", why) for host, why in slow.items() if host in found}
    found |= dict.fromkeys(attempt.blamed_hosts, ("failed", attempt.cause))
    found |= dict.fromkeys(attempt.rejected_hosts, ("rejected", "it failed a preflight"))
    found |= dict.fromkeys(attempt.left_out_hosts, ("left out", "earlier failures, see `hlatctl doctor`"))
    return [{"host": host, "state": state, "reason": why} for host, (state, why) in found.items()]


def _evaluations(run: RunPaths, state: RunState) -> list[dict[str, Any]]:
    running = [milestone for milestone in state.milestones.values() if milestone.progress]
    return [
        {
            "tokens": milestone.milestone_tokens,
            "task": progress.task,
            "done": progress.done,
            "total": progress.total,
            "tasks": progress.tasks,
            "is_live": state.simulated or is_held(run.eval_lease(milestone.milestone_tokens)),
        }
        for milestone in running
        if (progress := milestone.progress)
    ]


def _evaluation_queue(view: RunView) -> list[str]:
    if view.config is None or not view.state.milestones or view.state.evaluates:
        return []
    queue = evaluation_queue(view.state, view.config, time.time())
    waiting = f"Waiting: {waiting_text(queue)}." if queue.waiting else ""
    pace = "" if view.ended else forecast_text(queue)
    return [line for line in (waiting, pace and f"Pace: {pace}.") if line]


def samples(opened: OpenRun) -> list[dict[str, Any]]:
    """Return how all milestones of a run continue its prompts, oldest first."""
    with opened.lock:
        milestones = sorted(opened.refresh().state.milestones)
    return _samples(opened.run, milestones)


def _samples(run: RunPaths, milestones: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {"step": kept.step, "tokens": kept.milestone_tokens, "prompt": one.prompt, "text": one.text}
        for kept in continuations.history(run, milestones)
        for one in kept.continuations
    ]


def _amendment(amendment: AmendmentState) -> dict[str, Any]:
    after = amendment.applied_step
    return {
        "unix_s": amendment.time_unix_s,
        "from_step": None if after is None else after + 1,
        "begins": amendment.begins,
        "changes": [{"key": key, "before": old, "after": new} for key, (old, new) in amendment.changes.items()],
        "note": amendment.why,
        "by": amendment.by,
    }


def _warnings(events: Iterable[Event]) -> list[dict[str, Any]]:
    found = [event for event in events if event["kind"] in _WARNINGS]
    return [{"unix_s": event["time_unix_s"], "text": str(event.get("message", ""))} for event in found[-MOST_WARNINGS:]]


def _goodput(opened: OpenRun, view: RunView, events: list[Event]) -> dict[str, Any] | None:
    """Return the run's goodput. It takes seconds for a long run, so it is recomputed only after ten times as long."""
    if view.config is None or not view.state.attempts or view.status == "damaged":
        return None
    kept, now_s = opened.goodput, time.monotonic()
    if kept and (kept.version == opened.version or now_s < kept.until_s):
        return kept.value
    try:
        account = measure_goodput(events, view.config, view.state)
    except HlatctlError:
        return None
    value = {**dataclasses.asdict(account), "facts": facts(account)}
    took_s = time.monotonic() - now_s
    opened.goodput = Kept(opened.version, time.monotonic() + _KEPT_SHARE * took_s, value)
    return value


DEFAULT_LINES, MOST_LINES = 300, 5000
#: Maximum bytes read from the end of a file; a rank's lines are among those of its node.
_MOST_BYTES = 8 << 20
#: Maximum number of listed logs, the newest attempt's first. A run of thousands of nodes has more.
MOST_FILES = 500


def log_tail(
    run: RunPaths,
    *,
    name: str | None = None,
    attempt: int | None = None,
    rank: int | None = None,
    lines: int = DEFAULT_LINES,
) -> dict[str, Any]:
    """Return the logs of a run, and the last lines of one.

    Args:
        name: one of ``files``; None: the training log of the newest attempt, or else the newest log.
        attempt: list only the logs of this attempt; None: all.
        rank: return only the lines of this process, without the words that name it.
        lines: maximum number of lines.

    Raises:
        ConfigError: there is no such log, or ``lines`` is too large.
        DamagedFileError: it can't be read.
    """
    if not 1 <= lines <= MOST_LINES:
        raise ConfigError(f"lines={lines}: must be 1 to {MOST_LINES}", hint=f"lines={DEFAULT_LINES}")
    found = dict(_logs(run, attempt))
    listed = [{"name": key, "bytes": size} for key, size in list(found.items())[:MOST_FILES]]
    chosen = name or next((key for key in found if key.endswith("/train.log")), next(iter(found), None))
    if chosen is None:
        return {"files": [], "file": None, "lines": []}
    if chosen not in found:
        raise ConfigError(f"file={chosen:.100}: the run has no such log", hint=suggest(chosen, list(found)[:20]))
    path = run.root / "logs" / chosen
    with reading(path):
        text = _last_lines(path, lines, rank)
    return {"files": listed, "file": chosen, "lines": text}


def _logs(run: RunPaths, attempt: int | None) -> Iterator[tuple[str, int]]:
    top = run.root / "logs"
    folders = sorted(os.walk(top, followlinks=False), key=lambda found: found[0], reverse=True)
    for folder, _, names in folders:
        place = Path(folder).relative_to(top)
        number = attempt_of(place.parts[0]) if place.parts else None
        if attempt is not None and number != attempt:
            continue
        for name in sorted(names):
            status = os.lstat(Path(folder) / name)
            if name.endswith(".log") and stat.S_ISREG(status.st_mode):
                yield (place / name).as_posix(), status.st_size


def _last_lines(path: Path, count: int, rank: int | None) -> list[str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        file.seek(max(0, size - _MOST_BYTES))
        content = file.read(_MOST_BYTES)
    found = content.split(b"\n")
    if size > _MOST_BYTES:
        found = found[1:]
    if found and not found[-1]:
        found.pop()
    if rank is not None:
        start = rank_output.prefix(rank)
        found = [line[len(start) :] for line in found if line.startswith(start)]
    return [line.decode("utf-8", "replace").rstrip("\r") for line in found[-count:]]


#: Maximum number of runs in one comparison.
MOST_COMPARED = 50
#: Value of a key that a configuration doesn't have.
_MISSING = object()


def compared(runs: Sequence[RunPaths], published: str | None = None) -> dict[str, Any]:
    """Return what differs between runs, and their scores as `hlatctl compare` ranks them.

    Args:
        runs: runs in the order of the columns.
        published: a set of published scores to add; None: none.

    Raises:
        ConfigError: there are too many runs, or no such set.
    """
    if len(runs) > MOST_COMPARED:
        raise ConfigError(f"runs: {len(runs)} are given, at most {MOST_COMPARED} are allowed", hint="choose fewer")
    notes: list[str] = []
    scores = [_scores_of(run, notes) for run in runs]
    known = baselines.load(published) if published else None
    table = compare([score for score in scores if score], known)
    return {
        "config": _differences(runs),
        "scores": _score_rows(table, scores),
        "baselines": [column.name for column in table.columns if column.kind != RUN],
        "published": baselines.names(),
        "milestones": [{"tokens": score.tokens, "step": score.step} if score else None for score in scores],
        "notes": [*notes, *table.notes],
    }


def markdown(runs: Sequence[RunPaths], published: str | None = None) -> str:
    """Return a comparison as Markdown: where the runs are, their scores, and the settings that differ.

    Raises:
        ConfigError: there is no such set of published scores.
    """
    notes: list[str] = []
    rows = [row_of(view_run(run)) for run in runs]
    names = [row.name or row.run_id for row in rows]
    numbers = [
        [name, row.status + " (simulated)" * row.simulated, f"{row.step:,}", count(row.tokens), *_losses(row)]
        for name, row in zip(names, rows, strict=True)
    ]
    parts = ["# Comparison\n", markdown_table(["run", "status", "step", "tokens", "loss", "validation loss"], numbers)]
    if scores := [score for run in runs if (score := _scores_of(run, notes))]:
        known = baselines.load(published) if published else None
        parts += ["## Scores\n", compare_tables.markdown(compare(scores, known)).rstrip() + "\n"]
    parts += [f"- {note}\n" for note in notes]
    if differing := _differences(runs):
        cells = [[str(row["key"]), *map(value_text, row["values"])] for row in differing]
        parts += ["## Settings that differ\n", markdown_table(["setting", *names], cells)]
    return "\n".join(parts)


def _losses(row: RunRow) -> list[str]:
    return [f"{value:.4g}" if isinstance(value, int | float) else "–" for value in (row.loss, row.validation_loss)]


def paired(first: RunPaths, second: RunPaths) -> dict[str, Any]:
    """Return how the newest evaluated milestones of two runs differ, from the answers to the same questions.

    Raises:
        EvaluationError: a run has no evaluated milestone, or a file of items is damaged.
    """
    notes: list[str] = []
    sides = [(run, evaluated_milestone(run, read_state(run).milestones, None)) for run in (first, second)]
    found = compare_milestones(sides[0], sides[1], notes.append)
    shown = ("name", "metric", "items", "reworded", "first", "second", "low", "high", "holm")
    return {
        "rows": [
            {
                **{name: getattr(row, name) for name in shown},
                "gained": len(row.gained),
                "lost": len(row.lost),
                "is_real": row.is_real,
                "contracts": row.contracts.status,
            }
            for row in found.rows
        ],
        "left_out": found.left_out,
        "notes": notes,
    }


def _scores_of(run: RunPaths, notes: list[str]) -> RunScores | None:
    try:
        return read_scores(run, None, notes.append)
    except HlatctlError as error:
        notes.append(error.message)
        return None


def _differences(runs: Sequence[RunPaths]) -> list[dict[str, Any]]:
    configs: list[Mapping[str, Any]] = []
    for run in runs:
        configs.append({})
        with suppress(HlatctlError):  # a damaged run has no known value
            configs[-1] = flatten(of_run(run))
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        {"key": key, "values": [config.get(key) for config in configs]}
        for key in keys
        if any(config.get(key, _MISSING) != configs[0].get(key, _MISSING) for config in configs if config)
    ]


def _score_rows(table: Comparison, scores: Sequence[RunScores | None]) -> list[dict[str, Any]]:
    known = sum(score is not None for score in scores)
    found = []
    for row in table.rows:
        cells = iter(row.cells[:known])
        found.append(
            {
                "id": row.id,
                "section": row.section,
                "task": row.group,
                "part": row.part,
                "metric": row.metric,
                "unit": row.unit,
                "best": row.best,
                "headline": not row.part,
                "values": [_cell(next(cells)) if score else None for score in scores],
                "baselines": {
                    column.name: _cell(cell)
                    for column, cell in zip(table.columns[known:], row.cells[known:], strict=True)
                },
            }
        )
    return found


def _cell(cell: Cell | None) -> dict[str, Any] | None:
    return dataclasses.asdict(cell) if cell else None
