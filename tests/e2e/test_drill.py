"""A drill: a real run recovers from every fault, with exactly the losses of an undisturbed run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from flows.drill.pool import FAULTS
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths, stacks_name
from tests.e2e.conftest import Cli, Paced

pytestmark = pytest.mark.processes

#: The journal's name of each fault; those in CONTINUED don't restart training.
RESTARTED = {
    "kill_process": "killed",
    "stop_process": "hang",
    "preempt": "preempted",
    "bad_data": "data error",
    "flip_bytes": "checkpoint rejected (shard-",
    "cut_manifest": "checkpoint rejected (",
    # Rank 0 or 1; or the damaged one alone, if its bit is flipped between the two passes of a check.
    "flip_memory": "corruption (rank ",
}
CONTINUED = {
    "slow_process": "straggler (rank 1)",
    "trackers_down": "mlflow",
    "kill_head": "interrupted",
    "fill_disk": "disk full",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """Without a Prefect API other than the drill's own, which is killed."""
    # A slow process, which can't be told from one that sleeps, is the last fault before attempt 8.
    return Paced(tmp_path_factory.mktemp("drill"), pause_s=0.3, first_attempt=8)


@pytest.fixture(scope="module")
def drilled(alone: Cli) -> dict[str, Any]:
    # A slowed process runs for 20 ms at a time, so each step has to take longer.
    own = ("train.", "tracking", "checkpoint.")
    tiny = [override for override in alone.overrides if not override.startswith(own)]
    tiny += ["train.tokens=1T", "train.seq_len=256", "train.global_batch_size=8", "checkpoint.every_steps=5"]
    tiny += ["recovery.hang_floor_s=6", "recovery.straggler_steps=60"]
    result = alone.run("drill", "--json", *tiny, timeout_s=900)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_a_run_recovers_from_every_fault_with_the_losses_of_an_undisturbed_one(drilled: dict[str, Any]) -> None:
    outcomes = {outcome["fault"]: outcome for outcome in drilled["outcomes"]}
    assert set(outcomes) == {*RESTARTED, *CONTINUED}
    if shutil.which("bwrap") is None:
        assert outcomes.pop("fill_disk")["skipped"] == "needs bubblewrap (apt-get install bubblewrap)"
    for fault, outcome in outcomes.items():
        assert (outcome["failure"], outcome["skipped"], outcome["losses_equal"]) == ("", "", True), fault
        assert outcome["detected_as"].startswith({**RESTARTED, **CONTINUED}[fault]), fault
        assert (outcome["lost_steps"] > 0) <= (fault in RESTARTED), fault
    assert outcomes["preempt"]["lost_steps"] == 0, "it had time to write a checkpoint"
    assert "manifest.json: unreadable manifest" in outcomes["cut_manifest"]["detected_as"]
    assert outcomes["flip_bytes"]["lost_steps"] > 5, "the checkpoint before the newest one"
    assert drilled["killed_to_step_s"] > 0
    assert drilled["cold_start_s"] > 0


def test_the_report_has_the_table_and_the_hung_attempt_the_stacks(drilled: dict[str, Any]) -> None:
    run = Path(drilled["run"])
    page = (run / "report" / "index.html").read_text(encoding="utf-8")
    assert "<h2>Drill</h2>" in page
    assert all(escape(FAULTS[fault].title) in page for fault in (*RESTARTED, *CONTINUED))
    assert any("(most recent call first)" in log.read_text() for log in run.glob("logs/attempt-*/train.log"))
    (folder,) = {hang["path"] for hang in read_events(RunPaths(run)) if hang["kind"] == "hang"}
    assert (run / folder / stacks_name(0)).is_file(), "rank 1 was stopped, and answers nothing"
    assert f'<a href="../{folder}/{stacks_name(0)}">' in page


def test_a_driver_that_takes_over_measures_no_node_that_trains(drilled: dict[str, Any]) -> None:
    events = read_events(RunPaths(Path(drilled["run"])))
    taken_over = next(index for index, event in enumerate(events) if event["kind"] == "attempt_attached")
    before = [event for event in events[:taken_over] if event.get("stage") == "preflight"][-1]
    assert (before["kind"], before["why"]) == ("stage_skipped", "training is running on the nodes")


def test_a_drill_leaves_only_its_folder(alone: Cli, drilled: dict[str, Any]) -> None:
    folder = Path(drilled["run"]).parent
    assert list(alone.runs_dir.iterdir()) == [folder], "no other run, and no entry of this host in the node ledger"
    left = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if os.fsencode(folder) in _read(path)]
    assert not left, "processes"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""
