"""Imports the scores of other people's models: creates a run directory with only these scores and their provenance."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import conf.load
import hlatctl
from conf.schema import Config
from hlatctl.report.exchange.source import Source
from hlatctl.run import files, provenance, runs
from hlatctl.run.files import new_file
from hlatctl.run.journal import FLOW_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide

_UNNAMED = "scores"


def create(config: Config, source: Source, *, argv: list[str]) -> RunPaths:
    """Create a run with a file's scores at 0 tokens, like that of an external model.

    Args:
        config: the default configuration; only its runs folder and permissions matter.
        source: the checked file.
        argv: the command line as typed.

    Raises:
        StorageError: the directory can't be created.
    """
    config = replace(config, experiment_name="imported")
    mode, run_id = int(config.runs_mode, 8), runs.new_run_id(f"imported-{_plain(source.figures.model)}")
    record = provenance.collect(argv, Path(hlatctl.__file__).parent)

    def begin(run: RunPaths) -> None:
        files.write_json(run.provenance, {**record, "imported": source.provenance})
        _write_samples(run, source)
        _journal(run, run_id, source, argv)

    return runs.create_run(Path(config.runs_dir), run_id, conf.load.dump(config), mode, begin)


def _write_samples(run: RunPaths, source: Source) -> None:
    """Write items where evaluations write them; the first score of an item's task says what its value means."""
    folder = run.eval(0)
    for task, path in source.samples.items():
        if (figure := source.figures.figures.get(task)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with new_file(folder / path.name) as temporary:
                shutil.copyfile(path, temporary)
            scores = {task: _score(asdict(figure))}
            files.write_sealed_json(folder / "tasks" / f"{task}.json", {"metrics": {}, "scores": scores})


def _journal(run: RunPaths, run_id: str, source: Source, argv: list[str]) -> None:
    scores = {name: _score(asdict(figure)) for name, figure in source.figures.figures.items()}
    at: dict[str, Any] = {"milestone_tokens": 0, "step": 0}
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append(
            "run_created",
            run_id=run_id,
            simulated=False,
            argv=[hide(word) for word in argv],
            evaluates=source.figures.model or source.provenance["file"],
            imported=source.provenance,
        )
        journal.append("milestone", tokens=0, **at)
        journal.append("eval_finished", suite=source.figures.form, scores=scores, skipped={}, wall_s=0.0, **at)
        journal.append("run_finished", durable=True, outcome="finished", step=0, tokens=0, message="scores imported")


def _score(figure: dict[str, Any]) -> dict[str, Any]:
    always = ("metric", "value", "stderr", "n")
    return {key: value for key, value in figure.items() if key in always or value is not None}


def _plain(model: str) -> str:
    name = model.rstrip("/").rpartition("/")[2]
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)[:50]
    return plain.strip("-.") or _UNNAMED
