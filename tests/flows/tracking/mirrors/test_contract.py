"""What every mirror does, whatever its service: each entry once, the values that count, and all of it later."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.tracking.mirrors import base, copier, sync
from hlatctl.run.errors import RunBusyError, StorageError
from hlatctl.run.journal import FLOW_WRITER, OPERATOR_WRITER, JournalWriter, read_events, train_writer
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.flows.tracking.mirrors.conftest import Seen
from tests.flows.tracking.mirrors.make import evaluate, finish, label, losses, make_run, train
from tests.waiting import WAIT_S, wait_for

pytestmark = [
    pytest.mark.processes,
    # MLflow's own model of its tables, with the SQLAlchemy of today.
    pytest.mark.filterwarnings("ignore:The ..noload.. loader strategy is deprecated"),
]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "_EVENTS_AT_ONCE", 4)


def test_each_step_and_score_is_copied_once_in_batches(run: RunPaths, seen: Seen, small_batches: None) -> None:
    train(run, 1, 10)
    evaluate(run, 8)
    assert sync.sync(run, seen.name) == 10 + 1 + 2, "steps, scores, labels and outcome"
    assert sync.sync(run, seen.name) == 0
    train(run, 11, 13, attempt=2)
    assert sync.sync(run, seen.name) == 3
    assert seen.curve(run, "loss") == losses(1, 13)
    assert seen.scores(run, "mmlu_all") == [(8, 0.5)]
    assert seen.scores(run, "validation_loss") == [(8, 1.0)]


def test_a_number_without_a_row_in_the_table_of_metrics_is_copied_and_an_unknown_one_is_not(
    run: RunPaths, seen: Seen
) -> None:
    train(run, 1, 2, router_entropy=0.25)
    sync.sync(run, seen.name)
    assert seen.curve(run, "router_entropy") == [(1, 0.25), (2, 0.25)]
    assert seen.curve(run, "mfu") == []


def test_a_loss_that_is_not_finite_is_copied(run: RunPaths, seen: Seen) -> None:
    with JournalWriter(run, train_writer(0), 1) as journal:
        journal.append("step", step=1, tokens=100, loss=float("nan"), lr=1e-3)
    sync.sync(run, seen.name)
    ((step, loss),) = seen.curve(run, "loss")
    assert (step, math.isnan(float(loss or "nan"))) == (1, True)


@pytest.mark.parametrize("copied_between", [True, False])
def test_steps_that_a_later_attempt_repeats_have_its_values(
    run: RunPaths, seen: Seen, copied_between: bool, small_batches: None
) -> None:
    train(run, 1, 10)
    evaluate(run, 4)
    if copied_between:
        sync.sync(run, seen.name)
    train(run, 6, 8, attempt=2, add=100)
    sync.sync(run, seen.name)
    assert seen.curve(run, "loss") == [*losses(1, 5), *losses(6, 8, add=100)]
    assert seen.scores(run, "mmlu_all") == [(4, 0.5)]
    with JournalWriter(run, "train-rank00001", 1) as journal:  # a late line of the first attempt
        journal.append("step", step=9, tokens=900, loss=1.0)
    train(run, 9, 8, attempt=3)  # it has started, without a step so far
    sync.sync(run, seen.name)
    assert seen.steps(run) == list(range(1, 9))


@pytest.mark.parametrize("loss", ["removed", "damaged"])
def test_a_lost_cursor_repeats_nothing_and_keeps_no_superseded_step(run: RunPaths, seen: Seen, loss: str) -> None:
    train(run, 1, 10)
    evaluate(run, 2)
    sync.sync(run, seen.name)
    train(run, 6, 8, attempt=2, add=100)
    cursor = run.mirror_cursor(seen.name)
    cursor.unlink() if loss == "removed" else cursor.write_text('{"target": 1}')
    sync.sync(run, seen.name)
    assert seen.curve(run, "loss") == [*losses(1, 5), *losses(6, 8, add=100)]
    assert seen.scores(run, "mmlu_all")[0] == (2, 0.5)


def test_a_run_that_was_removed_at_the_service_is_copied_again(run: RunPaths, seen: Seen) -> None:
    evaluate(run, 1)
    train(run, 1, 5)
    sync.sync(run, seen.name)
    seen.lose(run)
    train(run, 6, 6, attempt=2)
    sync.sync(run, seen.name)
    assert seen.curve(run, "loss") == losses(1, 6)
    assert seen.scores(run, "mmlu_all")[0] == (1, 0.5)


#: Copies a run, and dies when the service has the second batch and the cursor is not written.
DIES = """
import os, sys
from pathlib import Path
from flows.tracking.mirrors import copier, sync
from hlatctl.run.paths import RunPaths
copier._EVENTS_AT_ONCE = 4
write, written = copier.Cursor.write, []
def dies(self, path):
    written.append(path)
    if len(written) == 2:
        os.kill(os.getpid(), 9)
    write(self, path)
copier.Cursor.write = dies
sync.sync(RunPaths(Path(sys.argv[1])), sys.argv[2])
"""


def test_a_copier_that_is_killed_before_its_cursor_is_written_leaves_nothing_twice(run: RunPaths, seen: Seen) -> None:
    train(run, 1, 4)
    evaluate(run, 3)
    train(run, 3, 10, attempt=2, add=100)
    argv = [sys.executable, "-c", DIES, str(run.root), seen.name]
    assert subprocess.run(argv, timeout=WAIT_S, check=False).returncode == -signal.SIGKILL
    sync.sync(run, seen.name)
    assert seen.curve(run, "loss") == [*losses(1, 2), *losses(3, 10, add=100)]


def test_a_service_that_is_away_gets_everything_later(run: RunPaths, seen: Seen) -> None:
    train(run, 1, 5)
    sync.sync(run, seen.name)
    train(run, 4, 9, attempt=2, add=100)
    with (
        seen.away(run),
        pytest.raises(StorageError, match=r"tracking\..*=.*\nhint: .*tracking|the run continues without"),
    ):
        sync.sync(run, seen.name)
    sync.sync(run, seen.name)
    assert seen.curve(run, "loss") == [*losses(1, 3), *losses(4, 9, add=100)]


def test_labels_and_amendments_are_shown_as_they_are_now(run: RunPaths, seen: Seen) -> None:
    train(run, 1, 2)
    label(run, name="first", tags=["model=small", "temporary"], note="begun")
    sync.sync(run, seen.name)
    assert all(word in seen.says(run) for word in ("first", "temporary", "begun"))
    with JournalWriter(run, OPERATOR_WRITER) as journal:
        changes = {"optimizer.lr": [0.0003, 0.0001]}
        journal.append("config_amended", number=1, changes=changes, by="ana", why="", at_step=None)
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("amendment_applied", number=1, step=40)
    label(run, name="best", untag=["temporary"], note="lower rate")
    for _ in range(2):
        sync.sync(run, seen.name)
        text = seen.says(run)
        assert "temporary" not in text
        words = ("best", "model", "small", "me: begun", "me: lower rate", "0.0003; from step 41: 0.0001")
        assert [word for word in words if word not in text] == []


def test_the_outcome_is_that_of_the_newest_driver(run: RunPaths, seen: Seen) -> None:
    train(run, 1, 2)
    for outcome in ("running", "stopped", "running", "failed"):
        if outcome == "running":
            with JournalWriter(run, FLOW_WRITER) as journal:
                journal.append("head_started", pid=1, host="here")
        else:
            finish(run, outcome, "HF_TOKEN=hunter2hunter2 is wrong")
        sync.sync(run, seen.name)
        assert seen.outcome(run) == outcome
    copied = [path for path in run.root.parent.rglob("*") if path.is_file() and run.journal not in path.parents]
    assert [path for path in copied if b"hunter2" in path.read_bytes()] == []


def test_a_service_gets_the_configuration_without_secrets(runs_dir: Path, seen: Seen) -> None:
    run = make_run(runs_dir, remote_url="s3://me:hunter2@bucket/runs")
    sync.sync(run, seen.name)
    assert "s3://***@bucket/runs" in seen.config(run, "checkpoint.remote_url")
    assert "512" in seen.config(run, "train.seq_len")


def test_a_long_run_has_fewer_steps_however_it_is_copied(
    runs_dir: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch, small_batches: None
) -> None:
    monkeypatch.setattr(base, "every_steps", lambda _: 4)
    monkeypatch.setattr(base, "FIRST_STEPS", 3)
    live, whole = make_run(runs_dir, "live"), make_run(runs_dir, "whole")
    for first, last, attempt in ((1, 9, 1), (7, 18, 2)):
        for run in (live, whole):
            train(run, first, last, attempt=attempt, add=100.0 * attempt)
        sync.sync(live, seen.name)
    sync.sync(whole, seen.name)
    assert seen.steps(whole) == [1, 2, 3, 4, 8, 12, 16]
    assert seen.curve(live, "loss") == seen.curve(whole, "loss")


def test_only_one_process_copies_a_run(run: RunPaths, seen: Seen) -> None:
    with sync.only_copier(run, seen.name), pytest.raises(RunBusyError, match="is copying it to"):
        sync.sync(run, seen.name)


def test_a_follower_copies_what_a_service_missed_and_ends_with_its_run(run: RunPaths, seen: Seen) -> None:
    train(run, 1, 3)
    argv = [sys.executable, "-m", "flows.tracking.mirrors.sync", str(run.root), seen.name]
    with hold_driver(run):
        away = seen.away(run)
        if seen.name != "wandb":  # its process tries for a minute
            away.__enter__()
        with subprocess.Popen(argv, start_new_session=True, stderr=subprocess.PIPE, text=True) as follower:
            try:
                if seen.name != "wandb":
                    wait_for(lambda: [e for e in read_events(run) if e["kind"] == "tracking_lost"])
                    away.__exit__(None, None, None)
                wait_for(run.mirror_cursor(seen.name).exists)
                train(run, 4, 5, attempt=2)
                finish(run)
                assert follower.wait(WAIT_S) == 0
            finally:
                follower.kill()
    assert (seen.curve(run, "loss"), seen.outcome(run)) == (losses(1, 5), "finished")
    kinds = [(e["kind"], e["what"]) for e in read_events(run) if e["kind"].startswith("tracking_")]
    assert kinds == ([] if seen.name == "wandb" else [("tracking_lost", seen.name), ("tracking_back", seen.name)])


def test_a_follower_of_a_run_without_a_driver_copies_the_rest_and_ends(run: RunPaths, seen: Seen) -> None:
    train(run, 1, 3)
    sync.follow(run, seen.name, lambda _: None)
    assert seen.curve(run, "loss") == losses(1, 3)
    train(run, 4, 4, attempt=2)
    with seen.away(run), pytest.raises(StorageError, match="tracking"):
        sync.follow(run, seen.name, lambda _: None)


def test_a_simulated_run_is_marked(runs_dir: Path, seen: Seen) -> None:
    run = make_run(runs_dir, "dry", simulated=True)
    train(run, 1, 2)
    assert sync.sync(run, seen.name) == 2 + 2
    if seen.name != "tensorboard":  # it has folders of its own
        assert "dry (SIMULATED)" in seen.says(run)
