"""What the processes of a job leave when one of them stands still."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from hlatctl.run import processes
from hlatctl.run.paths import answered, collectives_name, stacks_name
from tests.trainer.conftest import EventsOf, MakeRun, Start
from tests.waiting import wait_for

pytestmark = pytest.mark.processes


def test_all_processes_of_a_job_that_stands_still_leave_stacks_and_collectives(
    tmp_path: Path, make_run: MakeRun, start: Start, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "run", cluster={"processes_per_node": 2})
    job = start("tests.trainer.standing_rank", os.fspath(run.root), processes=2)
    folder = run.hang(1)
    try:
        wait_for(lambda: len(events_of(run, "step")) == 2)
        assert not folder.exists(), "nothing is written before somebody asks"

        def asked() -> bool:
            for rank in (0, 1):  # one after the other: their lines would mix in the log that they share
                _ask(job.pid, folder, rank)
            return answered(folder) == 2 and _started(folder, 0) > _started(folder, 1)

        wait_for(asked)  # rank 0 may not have reached the third step's collective at first
        stacks = [(folder / stacks_name(rank)).read_text() for rank in (0, 1)]
        assert "in update" in stacks[0], "it waits in a collective"
        assert "in late" in stacks[1], "it stands still in front of a batch"
    finally:
        for pid in (*processes.descendants(job.pid), job.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        output, _ = job.communicate()
    assert "in late" in output, "the log has the stacks too"


def _ask(job: int, folder: Path, rank: int) -> None:
    """Ask one process for its stacks, and wait until it has written them."""
    pid = processes.ranks(job)[rank].pid
    path = folder / stacks_name(rank)
    before = path.exists() and path.stat().st_mtime_ns
    processes.ask_for_stacks([pid])
    wait_for(lambda: path.exists() and path.stat().st_mtime_ns != before)


def _started(folder: Path, rank: int) -> int:
    """Return how many collectives a process has begun."""
    recorded = json.loads((folder / collectives_name(rank)).read_text())
    return int(max(entry["record_id"] for entry in recorded["fr"]))
