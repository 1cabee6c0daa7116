"""Open what a process trains on: the run's ``dataset.json``, read once for all ranks, and its batches.

One process of each replica and node reads and tokenizes, and sends the batches to the others that need tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.data_changes import DATA_CHANGED, TRAIN_STARTED, added_skips, check_same_corpus
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import DataError, HlatctlError
from hlatctl.run.files import JOB_FOLDER_ENV
from hlatctl.run.journal import Event, no_steps, read_events
from hlatctl.run.paths import RunPaths
from trainer.backends.base import Member
from trainer.checkpoint.manager import Restored
from trainer.checkpoint.together import on_rank0
from trainer.data.loader import Batches, Loader, NoBatches, ReceivedBatches, Sender, State, mixed_anew


def read_dataset(run: RunPaths, backend: Member) -> dict[str, Any]:
    """Return ``dataset.json`` on every rank. Raises a DataError if rank 0 can't read it."""

    def read() -> dict[str, Any]:
        try:
            return files.read_sealed_json(run.dataset)
        except (OSError, ValueError) as error:
            hint = f"restore it from a copy; if it is missing, `hlatctl resume {run.run_id}` prepares it"
            raise DataError(f"{run.dataset}: can't be read ({error})", hint=hint) from None

    dataset: dict[str, Any] = on_rank0(backend, read, run.root)
    return dataset


def open_batches(
    config: Config, run: RunPaths, dataset: dict[str, Any], backend: Member, last: Restored | None
) -> tuple[Batches, list[int | str]]:
    """Return this process's batches from the checkpoint's position, and the batches that ``data_changed`` events skip.

    Raises a DataError if the corpus isn't the one that the checkpoint was trained on.
    """
    events: list[Event] = on_rank0(backend, lambda: _data_changes(run), run.root)
    state: State | None = None
    if last and not config.begins_data_at(last.step):
        check_same_corpus(last.shared["dataset_fingerprint"], dataset, events)
        state = mixed_anew(config, last.step, last.loader)
    sequences, length = config.train.global_batch_size // backend.data_parallel_size, config.train.seq_len

    def read(sender: Sender | None) -> Loader:
        rank, size = backend.data_parallel_rank, backend.data_parallel_size
        return Loader(config, dataset, rank=rank, size=size, state=state, events=events, sender=sender)

    batches: Batches
    folder, ranks = os.environ.get(JOB_FOLDER_ENV), backend.data_ranks
    if backend.rank not in ranks:
        batches = NoBatches((sequences, length))
    elif folder is None or len(ranks) == 1:
        batches = read(None)
    else:
        socket = Path(folder) / f"batches-{ranks[0]}"
        if backend.rank == ranks[0]:
            batches = _read_for_others(read, Sender(socket, len(ranks) - 1))
        else:
            batches = ReceivedBatches(socket, (sequences, length + 1), ahead=config.data.prefetch_batches)
    return batches, added_skips(events)


def _read_for_others(read: Callable[[Sender], Loader], sender: Sender) -> Loader:
    try:
        return read(sender)
    except HlatctlError as error:  # such as a missing corpus; the others wait for a batch
        sender.fail(error)
        sender.close()
        raise


def _data_changes(run: RunPaths) -> list[Event]:
    """Return the events about skipped batches. The journal may grow while the processes start."""
    return [event for event in read_events(run, wanted=no_steps) if event["kind"] in (DATA_CHANGED, TRAIN_STARTED)]
