"""What a run needs of loader, storage and tracking; pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from conf.mlflow_steps import copied_steps
from conf.schema import Config
from conf.sizes import checkpoint_bytes, checkpoints_kept, fast_dir_bytes, runs_dir_bytes

#: Journal bytes of an optimizer step with its share of rarer events: 306 steps of the quickstart wrote 114,915 bytes
#: without the field `batch`, which adds 3,564.
JOURNAL_BYTES_PER_STEP = 387
#: Rows per step in MLflow, and a row's bytes in its SQLite database with indexes: 2,496 rows took 716,800.
MLFLOW_ROWS_PER_STEP = 8
MLFLOW_BYTES_PER_ROW = 287


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Volumes of a run. Rates are None without a step time.

    Args:
        loader_tokens_per_s: of each replica's loader.
        checkpoint_every_s: between one checkpoint and the next.
        checkpoint_bytes_per_s: at which all nodes together finish a checkpoint before the next one begins.
        checkpoint_bytes_per_node: of one checkpoint.
        disk_bytes: of the checkpoints kept and the one that is being written.
        fast_disk_bytes: of those in ``checkpoint.fast_dir``; 0 if it is not set.
    """

    loader_tokens_per_s: float | None
    checkpoint_bytes: int
    checkpoint_bytes_per_node: int
    checkpoint_every_s: float | None
    checkpoint_bytes_per_s: float | None
    checkpoints_kept: int
    disk_bytes: int
    fast_disk_bytes: int
    journal_bytes: int
    mlflow_bytes: int


def volume(config: Config, step_s: float | None) -> Volume:
    """Return the volumes of the whole run."""
    one, steps = checkpoint_bytes(config), config.total_steps
    every_s = None if step_s is None else step_s * config.checkpoint.every_steps
    tracked = config.tracking.enabled
    return Volume(
        loader_tokens_per_s=None if step_s is None else config.tokens_per_step / step_s / config.data_parallel_size,
        checkpoint_bytes=one,
        checkpoint_bytes_per_node=one // config.cluster.nodes,
        checkpoint_every_s=every_s,
        checkpoint_bytes_per_s=None if every_s is None else one / every_s,
        checkpoints_kept=checkpoints_kept(config),
        disk_bytes=runs_dir_bytes(config),
        fast_disk_bytes=fast_dir_bytes(config),
        journal_bytes=steps * JOURNAL_BYTES_PER_STEP,
        mlflow_bytes=copied_steps(steps) * MLFLOW_ROWS_PER_STEP * MLFLOW_BYTES_PER_ROW if tracked else 0,
    )
