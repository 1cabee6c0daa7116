"""Data: prepare the corpus as Arrow files and the tokenizer as a folder, once for all runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf import fingerprint
from conf.data_changes import check_same_corpus
from conf.schema import Config
from flows.runtime.context import FlowContext, cache_root
from flows.runtime.jobs import alone, run_job
from flows.stages import add_data_fingerprints, run_stage
from hlatctl.plan.budget import epochs
from hlatctl.run import files
from hlatctl.run.files import reading
from hlatctl.run.journal import no_steps, read_events
from hlatctl.run.paths import cache_dir, partial_data


def prepare_data(ctx: FlowContext) -> None:
    """Prepare corpus and tokenizer, and describe them in the run directory."""
    key = fingerprint.data_fingerprint(ctx.config)
    folder = cache_root(ctx.config) / "data" / key
    description = folder / "dataset.json"

    def adopt() -> dict[str, Any]:
        with reading(description, hint=f"remove {folder}; `hlatctl resume {ctx.run.run_id}` prepares the corpus again"):
            dataset = files.read_sealed_json(description)
        _refuse_another_corpus(ctx, dataset)
        _warn(ctx, dataset)
        files.write_sealed_json(ctx.run.dataset, dataset)
        add_data_fingerprints(ctx, dataset)
        return {name: dataset[name] for name in ("documents", "text_bytes", "fingerprint")}

    def work() -> dict[str, Any]:
        argv = ("--config", os.fspath(ctx.run.config), "--to", os.fspath(folder))
        with alone(ctx, folder, "data"):
            if not description.is_file():
                job = ctx.job("data", "-m", "trainer.data.prepare", *argv)
                run_job(ctx, job, until=_progress_of(ctx, partial_data(folder) / "progress"))
        return adopt()

    def done() -> str:
        if not description.is_file():
            return ""
        adopt()
        return f"prepared before in {folder}"

    run_stage(ctx, "data", key, work, done=done)


def _progress_of(ctx: FlowContext, file: Path) -> Callable[[], bool]:
    """Return a function that shows the job's line of progress when it changes.

    It returns False, so that the job continues.
    """
    shown = ""

    def show() -> bool:
        nonlocal shown
        try:
            line = file.read_text(encoding="utf-8").strip()
        except OSError:
            return False
        if line not in ("", shown):
            shown = line
            ctx.message(line)
        return False

    return show


def prepared_folder(config: Config) -> Path:
    """Return the folder of a configuration's prepared corpus, whatever the launcher: a simulation prepares none."""
    return cache_dir(Path(config.runs_dir)) / "data" / fingerprint.data_fingerprint(config)


def prepared_dataset(config: Config) -> dict[str, Any]:
    """Return ``dataset.json`` of the prepared corpus; empty if it isn't prepared or can't be read."""
    try:
        return files.read_sealed_json(prepared_folder(config) / "dataset.json")
    except (OSError, ValueError):
        return {}


def _refuse_another_corpus(ctx: FlowContext, dataset: dict[str, Any]) -> None:
    if not ctx.run.dataset.is_file():
        return
    with reading(ctx.run.dataset, hint="restore it from a copy: it identifies the run's corpus"):
        before = files.read_json(ctx.run.dataset)["fingerprint"]
    check_same_corpus(before, dataset, read_events(ctx.run, wanted=no_steps))


def _warn(ctx: FlowContext, dataset: dict[str, Any]) -> None:
    """Journal each warning about the corpus once: skipped data, and sources that are repeated too often."""
    warnings = [*dataset.get("warnings", []), *(row.warning for row in epochs(ctx.config, dataset) if row.warning)]
    if count := dataset.get("corrupt_count", 0):  # `data.on_corrupt=skip`
        first = dataset["corrupt"][0]
        warnings.append(f"data: {count} damaged rows or parts of files are skipped, the first: {first}")
    for message in warnings:
        if message not in ctx.state.warnings:
            ctx.event("warning", message=message)
            ctx.message(message)
