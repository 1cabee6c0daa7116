"""A sweep's report: the best arm as an experiment file, axes by importance, figures, page, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path

from conf import folders, simulation
from conf import space as spaces
from conf.compose import as_experiment
from flows.sweep.study import Study
from hlatctl.report import sweep as pages
from hlatctl.report.sweep import Curve, Winner, arms, best, distance
from hlatctl.run import files
from hlatctl.run.errors import cannot_write
from hlatctl.run.fold import read_state
from hlatctl.run.journal import read_events
from hlatctl.run.paths import SweepPaths
from hlatctl.run.sweep import SweepState, fold


def build(sweep: SweepPaths) -> Path:
    """Write a sweep's report from its journals, and return the path of its page.

    Raises:
        ConfigError: ``sweep.yaml`` is damaged, or the best arm can no longer be composed.
        StorageError: the report can't be written.
        DependencyError: matplotlib, optuna or scikit-learn is not installed.
    """
    state = fold(read_events(sweep))
    importances = _importances(sweep, state) if state.target is None else {}
    winner = _winner(state, spaces.load(sweep.space).config_dirs)
    curves = {number: Curve.of(read_state(sweep.trial(number))) for number in sorted(state.trials)}
    drawn = pages.draw(state, curves, importances)
    try:
        for name, text in drawn.items():
            files.write_text(sweep.report / "figures" / f"{name}.svg", text)
        if winner is not None:
            files.write_text(sweep.best, winner.experiment)
        files.write_text(sweep.report / "numbers.json", _numbers(state, importances, winner))
        files.write_text(sweep.report / "summary.md", pages.markdown(state, importances, winner, drawn))
        files.write_text(sweep.report / "index.html", pages.render(state, drawn, winner))
    except OSError as error:
        raise cannot_write(sweep.report, error) from None
    return sweep.report / "index.html"


def _importances(sweep: SweepPaths, state: SweepState) -> dict[str, float]:
    space = spaces.load(sweep.space)
    study = Study(space, state, minimize=state.direction == "min", seed=0, first_rung_tokens=1, path=None)
    return study.importances()


def _winner(state: SweepState, config_dirs: list[str]) -> Winner | None:
    arm = best(state)
    if arm is None:
        return None
    overrides = [*state.overrides, *(f"{key}={value}" for key, value in arm.point.items())]
    typed = [text for text in overrides if not text.startswith("runs_dir=") and text != simulation.OVERRIDE]
    with folders.using([Path(folder) for folder in config_dirs], others=False):
        experiment = as_experiment(typed, Path(state.folder), f"The best arm of the sweep {state.sweep_id}.")
    named = [word for folder in config_dirs for word in ("--config-dir", folder)]
    return Winner(text=arm.text, command=shlex.join(["hlatctl", "train", *typed, *named]), experiment=experiment)


def _numbers(state: SweepState, importances: dict[str, float], winner: Winner | None) -> str:
    first = best(state)
    ranked = [
        {
            "arm": arm.number,
            "point": arm.point,
            "values": arm.values,
            "mean": arm.mean,
            "stderr": arm.stderr,
            "off_the_best": distance(arm, first) if first else None,
            "trials": [trial.number for trial in arm.trials],
        }
        for arm in arms(state)
    ]
    for trial in (record := dataclasses.asdict(state))["trials"].values():  # JSON has no NaN
        trial["rungs"] = {tokens: value if math.isfinite(value) else None for tokens, value in trial["rungs"].items()}
    record |= {"best_first": ranked, "importances": importances, "command": winner.command if winner else None}
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"
