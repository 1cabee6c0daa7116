"""Write a run's report folder: ``index.html``, ``summary.md``, ``numbers.json`` and ``figures/``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import conf.load
from conf.of_run import of_run
from hlatctl.report import drill, figures, page, summary
from hlatctl.report.goodput import measure_goodput
from hlatctl.report.look_inside import looks
from hlatctl.report.numbers import numbers
from hlatctl.report.run_view import read_without_steps
from hlatctl.run import continuations, files
from hlatctl.run.errors import cannot_write
from hlatctl.run.paths import RunPaths


def build(run: RunPaths) -> Path:
    """Write the report from the journal's current events and return the path of its page.

    Raises:
        ConfigError: the run's configuration can't be read.
        StorageError: the report can't be written.
        DependencyError: matplotlib or jinja2 is not installed.
    """
    config = of_run(run)
    state, events = read_without_steps(run)
    time = measure_goodput(events, config, state)
    state.run_id = state.run_id or run.run_id
    run_numbers = numbers(state, config)
    drawn = figures.draw(state, config, run_numbers, time)
    texts = continuations.history(run, state.milestones)
    drilled, config_yaml = drill.drill(drill.read(run)), conf.load.dump(config)
    html = page.render(run_numbers, time, drilled, drawn, config_yaml, _provenance(run), texts, looks(run, state))
    record = {**dataclasses.asdict(run_numbers), "ledger": dataclasses.asdict(time)}
    try:
        for name, svg in drawn.items():
            files.write_text(run.report / "figures" / f"{name}.svg", svg)
        files.write_text(run.report / "numbers.json", json.dumps(record, indent=2) + "\n")
        files.write_text(run.report / "summary.md", summary.render(run_numbers, time))
        files.write_text(run.report / "index.html", html)
    except OSError as error:
        raise cannot_write(run.report, error) from None
    return run.report / "index.html"


def _provenance(run: RunPaths) -> dict[str, Any]:
    """Return the content of ``provenance.json``; empty if it is missing or damaged."""
    try:
        record = files.read_json(run.provenance)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
