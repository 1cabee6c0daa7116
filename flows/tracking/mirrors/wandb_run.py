"""A run at Weights & Biases. Its id there is the run's id, so a resumed run continues it.

A row's number (``_step``) is the optimizer step, and W&B accepts rows in ascending order only. So the number of its
newest row shows which steps it has. Scores arrive late: they are in the row of the newest step, with their own step and
tokens as columns. When training goes back to step k, W&B is asked to remove the rows after k (``resume_from``).

``wandb.log`` hands rows to a process of wandb, which uploads them. Only the end of a session shows whether that worked:
:meth:`Run.close` waits for it. A later session asks W&B what it has, and the rest is copied again from the journal.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from conf.schema import TrackingConfig
from flows.tracking.mirrors.base import About, Labels, Mirror, Outcome, Point, Scores, Service
from hlatctl.run.labels import MARK

#: W&B's maximum length of a tag.
_TAG_CHARS = 64
#: W&B's maximum length of a name.
_NAME_CHARS = 128
_INIT_TIMEOUT_S = 60.0
#: Maximum seconds to wait for uploads at the end of a session.
_FINISH_TIMEOUT_S = 600.0
#: Seconds between two writes of an offline file.
_OFFLINE_FLUSH_S = 1.0
_ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


class Run(Mirror):
    """One run at W&B; see :class:`Mirror`.

    Args:
        tracking: entity, project and mode.
        last_step: newest step copied so far; needed for offline files, because only W&B itself knows what it has.

    Raises:
        wandb.Error: W&B doesn't answer, or refuses the run.
    """

    def __init__(self, about: About, tracking: TrackingConfig, last_step: int) -> None:
        self._about, self._tracking = about, tracking
        self._offline = tracking.wandb_mode == "offline"
        self._failed = False
        os.environ.update(_ENVIRONMENT)
        # Another process's wandb would keep a run open that this process left when it was killed.
        os.environ.pop("WANDB_SERVICE", None)
        self._run = self._init(resume="allow")
        self.is_new = not self._offline and not self._run.resumed
        self.last_step = last_step if self._offline else self._newest_row()

    def steps(self, points: Sequence[Point]) -> None:
        """Log each step as a row."""
        for point in points:
            values = {f"train/{name}": value for name, value in point.values.items()}
            self._run.log({**values, "train/tokens": point.tokens, "_timestamp": point.time_unix_s}, step=point.step)
        self.last_step = points[-1].step

    def rewind(self, step: int, tokens: int) -> bool:
        """Ask W&B to remove the rows after this step. If it can't, the earlier values of these steps stay."""
        import wandb

        self._finish()
        try:
            self._run = self._init(resume_from=f"{self._about.run_id}?_step={step}")
        except wandb.Error:
            self._run = self._init(resume="allow")
            return False
        self.last_step = step
        return True

    def scores(self, scores: Scores) -> None:
        """Log scores in the row of the newest step, or in a row of their own if that was already sent."""
        row = max(self.last_step, self._run.starting_step)
        values = {f"{scores.group}/{task}": value for task, value in scores.values.items()}
        axes = {f"{scores.group}/step": scores.step, f"{scores.group}/tokens": scores.tokens}
        self._run.define_metric(f"{scores.group}/*", step_metric=f"{scores.group}/step")
        self._run.log({**values, **axes, "_timestamp": scores.time_unix_s}, step=row)
        self.last_step = row

    def labels(self, labels: Labels) -> None:
        """Set name, tags, notes, and the known amendments and provenance in the configuration."""
        tags = [f"{key}={value}" if value else key for key, value in labels.tags.items()]
        marks = [MARK] if self._about.simulated else []
        self._run.name = labels.name[:_NAME_CHARS]
        self._run.tags = tuple(tag[:_TAG_CHARS] for tag in [*marks, *tags])
        self._run.notes = "\n\n".join(labels.notes)
        beside = {"hlatctl.amended": dict(labels.amended), "hlatctl.facts": dict(labels.facts)}
        self._run.config.update({key: value for key, value in beside.items() if value}, allow_val_change=True)

    def outcome(self, outcome: Outcome) -> None:
        """Set the outcome in the summary. The end of the session sets W&B's own state."""
        self._run.summary.update({"outcome": outcome.status, "outcome_message": outcome.message})
        self._failed = outcome.status == "failed"

    def flush(self) -> dict[str, Any]:
        """Do nothing: wandb's process has the rows."""
        return {}

    def close(self) -> None:
        """Wait until everything is uploaded, at most 10 minutes.

        Raises:
            wandb.Error, TimeoutError: not everything was uploaded.
        """
        self._finish()

    def _newest_row(self) -> int:
        return max(0, int(self._run.starting_step) - 1)

    def _init(self, *, resume: Literal["allow"] | None = None, resume_from: str | None = None) -> Any:
        import wandb

        about, tracking = self._about, self._tracking
        try:
            return wandb.init(
                id=about.run_id,
                entity=tracking.wandb_entity,
                project=tracking.experiment,
                group=about.sweep or None,
                config=dict(about.config),
                settings=wandb.Settings(**_settings(about.root, tracking)),
                resume=resume,
                resume_from=resume_from,
            )
        except wandb.Error:
            wandb.teardown()  # its process would refuse the same id until it ends
            raise

    def _finish(self) -> None:
        import wandb

        folder = Path(self._run.settings.sync_dir)
        try:
            self._run.finish(exit_code=int(self._failed))
        except Exception:
            wandb.teardown(exit_code=int(self._failed))
            raise
        if not self._offline:  # the journal has everything that was in it
            shutil.rmtree(folder, ignore_errors=True)


class Wandb(Service):
    """Weights & Biases, or its offline files in the run directory."""

    lasting = True

    @property
    def target(self) -> str:
        """Mode, entity and project."""
        tracking = self.config.tracking
        return f"{tracking.wandb_mode} {tracking.wandb_entity}/{tracking.experiment}"

    def open(self, about: About, kept: dict[str, Any], last_step: int) -> Run:
        """Begin a session."""
        return Run(about, self.config.tracking, last_step)


def _settings(root: Path, tracking: TrackingConfig) -> Mapping[str, Any]:
    """Return wandb's settings: files in the run directory, and no information about this process or machine."""
    return {
        "mode": tracking.wandb_mode,
        "root_dir": os.fspath(root),
        "silent": True,
        "console": "off",
        "symlink": False,
        "save_code": False,
        "disable_code": True,
        "disable_git": True,
        "disable_job_creation": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "x_transaction_log_flush_interval": _OFFLINE_FLUSH_S,
        "init_timeout": _INIT_TIMEOUT_S,
        "finish_timeout": _FINISH_TIMEOUT_S,
        "finish_timeout_raises": True,
    }
