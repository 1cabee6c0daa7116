"""Simulated checkpoints: folders with a valid manifest and no tensors, kept and deleted like real ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from conf.schema import Config
from conf.training_rules import CheckpointPolicy
from hlatctl.run import files
from hlatctl.run.checkpoint import MANIFEST, Manifest, checkpoint_steps
from hlatctl.run.paths import RunPaths, step_name


def write(run: RunPaths, config: Config, step: int) -> tuple[Path, Manifest]:
    """Write a checkpoint, without fsync; return its folder and manifest."""
    folder, temporary = run.checkpoint(step), run.checkpoints / f".tmp-{step_name(step)}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / "simulated.json").write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    manifest = Manifest(
        step=step,
        tokens=config.tokens_at(step),
        files=files.describe_tree(temporary),
        world={"data_parallel_size": config.data_parallel_size},
    )
    record = {**asdict(manifest), "sha256": manifest.sha256}
    (temporary / MANIFEST).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder, manifest


class Kept:
    """The checkpoints of a run that have not been deleted.

    The run directory is read once, because nothing else writes checkpoints there.
    """

    def __init__(self, run: RunPaths, config: Config) -> None:
        self._run, self._config, self._policy = run, config, CheckpointPolicy(config)
        self.steps = checkpoint_steps(run)

    def add(self, step: int) -> tuple[Path, Manifest, list[int]]:
        """Write a checkpoint, delete what the trainer would, and return folder, manifest and deleted steps."""
        folder, manifest = write(self._run, self._config, step)
        self.steps = sorted({*self.steps, step})
        deleted = sorted(self._policy.to_delete(self.steps, verified=self.steps, is_evaluated=self._is_evaluated))
        for step in deleted:
            shutil.rmtree(self._run.checkpoint(step), ignore_errors=True)
            self.steps.remove(step)
        return folder, manifest, deleted

    def _is_evaluated(self, milestone_tokens: int) -> bool:
        return (self._run.eval(milestone_tokens) / "results.json").is_file()
