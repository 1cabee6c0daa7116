"""Changes the data of a run that has started: skips batches, or accepts a changed corpus. Both are journalled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conf.data_changes import (
    DATA_CHANGED,
    FINGERPRINT,
    SKIP_STEPS,
    batch_numbers,
    batches_after,
    ranges,
    skipped_batches,
)
from conf.of_run import of_run
from flows.stages.data import prepared_folder
from hlatctl.run import files
from hlatctl.run.checkpoint import batches_drawn, checkpoint_steps, events_about
from hlatctl.run.errors import ConfigError, DataError
from hlatctl.run.files import DAMAGED, why
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter
from hlatctl.run.paths import RunPaths


def skip_steps(run: RunPaths, steps: str, *, by: str, reason: str) -> list[int | str]:
    """Skip the batches of some steps from the run's next attempt on, and return these batches, as numbers and ranges.

    Args:
        steps: such as ``120-125`` or ``7,9``.
        by: name of the user, for the journal.

    Raises:
        ConfigError: the newest checkpoint already contains one of the steps, or ``steps`` has another form.
    """
    numbers = sorted(batch_numbers(steps.split(","), "--steps", "such as --steps=120-125 or --steps=7,9"))
    newest = max(checkpoint_steps(run), default=0)
    if numbers[0] <= newest:
        raise ConfigError(
            f"--steps={numbers[0]}: is already trained; the newest checkpoint is of step {newest}",
            hint=f"choose steps after {newest}, or move the checkpoints from step {numbers[0]} on out of the run first",
        )
    events = events_about(run, newest)
    config = of_run(run)
    drawn = 0 if config.begins_data_at(newest) else batches_drawn(run, newest, events)
    skipped = skipped_batches(config, events)
    batches = ranges(batches_after(drawn, (step - newest for step in numbers), skipped))
    _journal(run, SKIP_STEPS, batches, by, reason)
    return batches


def accept_corpus(run: RunPaths, *, by: str, reason: str) -> tuple[str, str]:
    """Let a run continue with the corpus as currently prepared. Changes nothing if the corpus is the same.

    Args:
        by: name of the user, for the journal.

    Returns:
        The fingerprints of the run's corpus and of the prepared corpus.

    Raises:
        DataError: one of the corpora is missing or can't be read.
    """
    path = prepared_folder(of_run(run)) / "dataset.json"
    try:
        prepared, current = _fingerprint(path), _fingerprint(run.dataset)
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename}: not found, so there is nothing to accept",
            hint=f"`hlatctl resume {run.run_id}` prepares the corpus as it is now and reports whether it has changed",
        ) from None
    if prepared != current:
        _journal(run, FINGERPRINT, prepared, by, reason)
    return current, prepared


def _fingerprint(dataset: Path) -> str:
    try:
        return str(files.read_json(dataset)["fingerprint"])
    except FileNotFoundError:
        raise
    except (OSError, *DAMAGED) as error:
        raise DataError(f"{dataset}: can't be read ({why(error)})", hint="restore it from a copy") from None


def _journal(run: RunPaths, key: str, value: Any, by: str, reason: str) -> None:
    with files.created_like(run.root), JournalWriter(run, OPERATOR_WRITER) as journal:
        journal.append(DATA_CHANGED, durable=True, key=key, value=value, by=by, why=reason)
