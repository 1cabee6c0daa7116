"""Make runs by writing their journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conf import load
from conf.schema import CheckpointConfig, Config, TrackingConfig
from hlatctl.run import labels, runs
from hlatctl.run.journal import FLOW_WRITER, JournalWriter, eval_writer, train_writer
from hlatctl.run.paths import RunPaths

TOKENS = 100


def make_run(
    runs_dir: Path,
    run_id: str = "one",
    *,
    of: dict[str, Any] | None = None,
    simulated: bool = False,
    remote_url: str | None = None,
    **tracking: Any,
) -> RunPaths:
    settings: dict[str, Any] = {"enabled": False, "poll_s": 0.2, **tracking}
    checkpoint = CheckpointConfig(remote_url=remote_url)
    config = Config(runs_dir=str(runs_dir), tracking=TrackingConfig(**settings), checkpoint=checkpoint)
    run = runs.create_run(runs_dir, run_id, load.dump(config))
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("run_created", run_id=run_id, simulated=simulated, **(of or {}))
        journal.append("head_started", pid=1, host="here")
    return run


def train(run: RunPaths, first: int, last: int, *, attempt: int = 1, add: float = 0.0, **more: Any) -> None:
    """Train from the first to the last step in one attempt; ``add`` is added to each loss."""
    with JournalWriter(run, FLOW_WRITER, attempt) as journal:
        journal.append("attempt_started", handle={})
    with JournalWriter(run, train_writer(0), attempt) as journal:
        journal.append("train_started", resumed_from_step=first - 1, tokens=(first - 1) * TOKENS)
        for step in range(first, last + 1):
            journal.append("step", step=step, tokens=step * TOKENS, loss=step / 8 + add, lr=1e-3, mfu=None, **more)


def losses(first: int, last: int, *, add: float = 0.0) -> list[tuple[int, float]]:
    """Return the steps and losses of :func:`train`."""
    return [(step, step / 8 + add) for step in range(first, last + 1)]


def evaluate(run: RunPaths, step: int, value: float = 0.5, contract: str = "c" * 64) -> None:
    tokens = step * TOKENS
    scores = {"mmlu:all": {"metric": "acc", "value": value}, "validation_loss": {"metric": "nats", "value": 2 * value}}
    with JournalWriter(run, eval_writer(tokens)) as journal:
        journal.append("eval_finished", milestone_tokens=tokens, step=step, scores=scores, contract=contract)


def label(run: RunPaths, **what: Any) -> None:
    labels.write_label(run, labels.change(**what), by="me")


def finish(run: RunPaths, outcome: str = "finished", message: str = "") -> None:
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("run_finished", outcome=outcome, step=0, tokens=0, message=message)
