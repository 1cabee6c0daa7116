"""A run at W&B. wandb's own client talks to a server on loopback, or writes files that `wandb sync` uploads to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.of_run import of_run
from flows.tracking.mirrors import sync
from hlatctl.run.errors import StorageError
from hlatctl.run.paths import RunPaths
from tests.flows.tracking.mirrors.conftest import KEY
from tests.flows.tracking.mirrors.fake_wandb import FakeWandb, Kept
from tests.flows.tracking.mirrors.make import evaluate, finish, label, make_run, train
from tests.waiting import WAIT_S

pytestmark = pytest.mark.processes


def copy(run: RunPaths, fake: FakeWandb) -> Kept:
    sync.sync(run, "wandb")
    return fake.runs[run.run_id]


def test_a_run_has_its_steps_scores_labels_and_outcome(run: RunPaths, fake: FakeWandb) -> None:
    label(run, name="best", tags=["model=small"], note="looks good")
    train(run, 1, 10)
    evaluate(run, 8, 0.5)
    finish(run, "failed", "it broke")
    os.utime(run.config, (1e9, 1e9))
    kept = copy(run, fake)
    assert all(abs(row["_timestamp"] - run.config.stat().st_ctime) < WAIT_S for row in kept.rows if "_timestamp" in row)
    assert kept.curve("train/loss", axis="train/tokens") == [(n * 100, n / 8) for n in range(1, 11)]
    assert kept.curve("eval/mmlu_all", axis="eval/step") == [(8, 0.5)]
    assert kept.curve("eval/validation_loss", axis="eval/tokens") == [(800, 1.0)]
    assert (kept.name, kept.tags, kept.exit_code) == ("best", ["model=small"], 1)
    assert kept.notes.endswith("me: looks good")
    assert (kept.summary["outcome"], kept.summary["outcome_message"]) == ("failed", "it broke")
    assert kept.config["train.seq_len"]["value"] > 0


def test_a_server_that_cannot_remove_rows_keeps_them(run: RunPaths, fake: FakeWandb) -> None:
    fake.rewinds = False
    train(run, 1, 10)
    copy(run, fake)
    train(run, 6, 12, attempt=2, add=100)
    assert copy(run, fake).curve("train/loss") == [(n, n / 8 + (100 if n > 10 else 0)) for n in range(1, 13)]


def test_scores_after_the_end_have_a_row_of_their_own(run: RunPaths, fake: FakeWandb) -> None:
    train(run, 1, 3)
    copy(run, fake)
    evaluate(run, 2)
    kept = copy(run, fake)
    assert kept.curve("eval/mmlu_all") == [(4, 0.5)]
    assert kept.curve("eval/mmlu_all", axis="eval/step") == [(2, 0.5)]
    train(run, 4, 5, attempt=2)  # the run goes on: row 4 becomes that of step 4
    kept = copy(run, fake)
    assert [step for step, _ in kept.curve("train/loss")] == [1, 2, 3, 4, 5]
    assert kept.curve("eval/mmlu_all", axis="eval/step") == [(2, 0.5)]


def test_a_server_that_leaves_during_a_session_gets_the_rest_later(run: RunPaths, fake: FakeWandb) -> None:
    session = sync.Session(run, of_run(run), "wandb")
    train(run, 1, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flows.tracking.mirrors.wandb_run._FINISH_TIMEOUT_S", 1.0)
        session.copy_new()
    fake.away = True
    train(run, 4, 6, attempt=2)
    session.copy_new()
    with pytest.raises(StorageError, match=r"tracking\.mirrors=wandb"):
        session.close()
    fake.away = False
    assert copy(run, fake).curve("train/loss") == [(n, n / 8) for n in range(1, 7)]


def test_the_key_is_in_no_file_and_nothing_of_this_machine_is_sent(run: RunPaths, fake: FakeWandb) -> None:
    train(run, 1, 3)
    copy(run, fake)
    found = [path for path in run.root.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert found == []
    assert not (run.root / "wandb").is_dir() or not list((run.root / "wandb").iterdir()), "it was all uploaded"
    assert KEY.encode() not in fake.received
    assert os.uname().nodename.encode() not in fake.received


def test_offline_files_continue_each_other_when_they_are_uploaded(tmp_path: Path, fake: FakeWandb) -> None:
    run = make_run(tmp_path, "offline", wandb_mode="offline")
    train(run, 1, 4)
    evaluate(run, 3)
    sync.sync(run, "wandb")
    train(run, 5, 8, attempt=2)
    sync.sync(run, "wandb")
    train(run, 6, 10, attempt=3, add=100)
    finish(run)
    sync.sync(run, "wandb")
    assert sync.sync(run, "wandb") == 0
    assert fake.runs == {}
    folders = sorted((run.root / "wandb").glob("offline-run-*"))
    wandb = Path(sys.executable).with_name("wandb")
    words: list[str | Path] = [wandb, "sync", "--yes", "--id", run.run_id, *folders]
    subprocess.run(words, check=True, capture_output=True, timeout=WAIT_S, cwd=tmp_path)
    kept = fake.runs["offline"]
    assert kept.curve("train/loss") == [(n, n / 8 + (100 if n > 5 else 0)) for n in range(1, 11)]
    assert kept.curve("eval/mmlu_all", axis="eval/step") == [(3, 0.5)]


def test_a_simulated_run_is_marked(tmp_path: Path, fake: FakeWandb) -> None:
    run = make_run(tmp_path, "dry", simulated=True)
    train(run, 1, 2)
    kept = copy(run, fake)
    assert (kept.name, kept.tags) == ("dry (SIMULATED)", ["SIMULATED"])
