"""How many batches of its data a run had drawn at a checkpoint. Batches are numbered from 1; skipped ones count."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hlatctl.run import files
from hlatctl.run.journal import Event, no_steps, read_events
from hlatctl.run.paths import RunPaths
from hlatctl.run.rank_states import first_states_file
from hlatctl.run.reading import reading


def events_about(run: RunPaths, step: int) -> list[Event]:
    """Return the events of a run in order of time, without those of other steps."""
    of_step = re.compile(rb'"step": ?%d[,}]' % step)
    return read_events(run, wanted=lambda line: no_steps(line) or of_step.search(line) is not None)


def batches_drawn(run: RunPaths, step: int, events: Sequence[Event]) -> int:
    """Return the number of the last batch that a checkpoint has been trained on; 0 at step 0.

    Args:
        step: of the checkpoint.
        events: of the run's journal, in order of time; :func:`events_about` the step is enough.

    Raises:
        DamagedFileError: neither the journal nor the checkpoint has the number.
    """
    if step == 0:
        return 0
    of_step = [event for event in events if event.get("step") == step]
    committed = [event["attempt"] for event in of_step if event["kind"] == "checkpoint_committed"]
    batches = [
        event["batch"]
        for event in of_step
        if event["kind"] in ("step", "nonfinite")
        and event.get("batch") is not None
        and event["attempt"] in (committed[-1:] or [event["attempt"]])
    ]
    return int(batches[-1]) if batches else _from_checkpoint(run, step)


def _from_checkpoint(run: RunPaths, step: int) -> int:
    """Read the number from the first loader's state: journals of older releases don't have it."""
    path = first_states_file(run.checkpoint(step))
    with reading(path, hint=f"`hlatctl checkpoint verify {run.run_id}`"):
        return int(files.read_json(path)["loader"][0][0])
