"""A sweep as the live page shows it: its arms, best first, its trials, and what its report has computed."""

from __future__ import annotations

import json
from typing import Any

from hlatctl.report.ladder import results_of
from hlatctl.report.run_view import view_sweep
from hlatctl.report.sweep import arms, best, distance, facts
from hlatctl.report.sweep import markdown as as_markdown
from hlatctl.run import files
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import RunPaths, SweepPaths


def details(sweep: SweepPaths) -> dict[str, Any]:
    """Return everything that the page shows of a sweep.

    Raises:
        StorageError: its journal can't be read.
    """
    state, _ = view_sweep(sweep)
    winner = best(state)
    ranked = []
    for arm in arms(state):
        gap = distance(arm, winner) if winner is not None and arm.number != winner.number else None
        ranked.append(
            {
                "arm": arm.number,
                "point": arm.point,
                "mean": arm.mean,
                "stderr": arm.stderr,
                "difference": gap[0] if gap else None,
                "difference_stderr": gap[1] if gap else None,
                "trials": [trial.number for trial in arm.trials],
            }
        )
    return {
        "sweep_id": sweep.run_id,
        "name": state.labels.name,
        "tags": state.labels.tags,
        "notes": [{"unix_s": note.time_unix_s, "text": note.text} for note in state.labels.notes],
        "status": state.status,
        "trials_planned": state.trials_planned,
        "simulated": state.simulated,
        "facts": facts(state)[1:],
        "objective": state.objective,
        "direction": state.direction,
        "axes": state.axes,
        "target": state.target,
        "forecast": state.forecast and {**state.forecast.fields, "results": results_of(state)},
        "arms": ranked,
        "trials": [
            {
                "number": trial.number,
                "run_id": trial.run_id,
                "arm": trial.arm,
                "seed": trial.seed,
                "status": trial.status,
                "value": trial.value,
                "why": trial.why,
                "tokens": trial.tokens,
                "process_hours": trial.process_hours,
                "ended_unix_s": trial.ended_unix_s,
                "rungs": sorted(trial.rungs.items()),
            }
            for _, trial in sorted(state.trials.items())
        ],
        "importances": _importances(sweep),
    }


def markdown(sweep: SweepPaths) -> str:
    """Return a sweep's facts, arms and trials as Markdown, as its report does, without figures."""
    state, _ = view_sweep(sweep)
    return as_markdown(state, _importances(sweep), None)


def best_first(sweep: SweepPaths) -> list[RunPaths]:
    """Return the runs of all trials of a sweep, those of the best arm first; some may have no folder yet."""
    state, _ = view_sweep(sweep)
    return [sweep.trial(trial.number) for arm in arms(state) for trial in arm.trials]


def _importances(sweep: SweepPaths) -> dict[str, float]:
    """Return the axes' shares of the variance that the sweep's report has computed; empty without a report."""
    try:
        found = json.loads(files.read_text(sweep.report / "numbers.json"))["importances"]
        return {str(key): float(share) for key, share in found.items()}
    except (OSError, *DAMAGED):
        return {}
