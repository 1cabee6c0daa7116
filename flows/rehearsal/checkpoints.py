"""Simulated checkpoints: folders with a true manifest and nothing in them, kept and deleted like real ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.manifest import MANIFEST, Manifest, checkpoint_steps
from hlatctl.run.paths import RunPaths, step_name


def write(run: RunPaths, config: Config, step: int) -> tuple[Path, Manifest]:
    """Make one; its folder and manifest. Not made to survive a power cut: there are hundreds and nothing is in them."""
    folder, temporary = run.checkpoint(step), run.checkpoints / f".tmp-{step_name(step)}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / "simulated.json").write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    manifest = Manifest(
        step=step, tokens=step * config.tokens_per_step, files=files.describe_tree(temporary),
        world={"data_parallel_size": config.data_parallel_size},
    )  # fmt: skip
    record = {**asdict(manifest), "sha256": manifest.sha256}
    (temporary / MANIFEST).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder, manifest


def delete_unwanted(run: RunPaths, config: Config) -> list[int]:
    """Delete what the trainer would: all but the newest few, those not evaluated yet, and the permanent ones."""
    rolling = [step for step in checkpoint_steps(run) if not _is_protected(run, config, step)]
    unwanted = rolling[: -config.checkpoint.keep]
    for step in unwanted:
        shutil.rmtree(run.checkpoint(step), ignore_errors=True)
    return unwanted


def _is_protected(run: RunPaths, config: Config, step: int) -> bool:
    tokens = config.milestones.get(step)
    waits = tokens is not None and not (run.eval(tokens) / "results.json").is_file()
    return waits or config.is_permanent(step)
