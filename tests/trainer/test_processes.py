"""Training by real processes: interrupted runs resume with the same bits."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hlatctl.run import fence
from hlatctl.run.checkpoint import checkpoint_steps
from hlatctl.run.errors import RunBusyError, StorageError
from hlatctl.run.paths import RunPaths
from tests.ports import free_port
from tests.trainer.conftest import EventsOf, Finish, MakeRun, Start, TrainHere
from tests.waiting import wait_for
from trainer.convert.export import read_weights

pytestmark = pytest.mark.processes

_LONG: dict[str, Any] = {
    "train": {"tokens": 240 * 4 * 32, "global_batch_size": 4, "micro_batch_size": 2},
    "checkpoint": {"every_steps": 50},
    "cluster": {"processes_per_node": 2},
}
_BAD_DISK = "tests.trainer.bad_disk"
_METRICS = ("loss", "grad_norm", "param_norm", "lr", "tokens")


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun, start: Start, finish: Finish
) -> RunPaths:
    run = make_run(tmp_path_factory.mktemp("runs") / "uninterrupted", **_LONG)
    finish(start("trainer", "--run-dir", os.fspath(run.root), "--attempt", "1", processes=2))
    return run


def _wait_for_steps(run: RunPaths, count: int, process: Any) -> None:
    journal = run.journal / "train-rank00000.jsonl"

    def reached() -> bool:
        if journal.exists() and journal.read_bytes().count(b'"kind":"step"') >= count:
            return True
        assert process.poll() is None, process.communicate()[0]
        return False

    wait_for(reached)


def _start_ranks(start: Start, *argv: str, **env: str) -> list[Any]:
    """Start two processes of a job without torchrun, so that the end of one doesn't end the other."""
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [start(*argv, **env, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]


def _assert_continues(run: RunPaths, reference: RunPaths, events_of: EventsOf) -> None:
    expected = {event["step"]: event for event in events_of(reference, "step")}
    again = events_of(run, "step", 2)
    assert again
    assert again[-1]["step"] == 240
    for event in again:
        assert {key: event[key] for key in _METRICS} == {key: expected[event["step"]][key] for key in _METRICS}
    ours, theirs = read_weights(run, 240), read_weights(reference, 240)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_every_step_is_journalled_and_the_loss_falls(uninterrupted: RunPaths, events_of: EventsOf) -> None:
    steps = events_of(uninterrupted, "step")
    assert [event["step"] for event in steps] == list(range(1, 241))
    assert steps[-1]["tokens"] == 240 * 4 * 32
    assert steps[-1]["loss"] < steps[0]["loss"] - 1.0
    (started,) = events_of(uninterrupted, "train_started")
    assert (started["resumed_from_step"], started["world"], started["device"]) == (0, 2, "cpu")
    assert [e["reason"] for e in events_of(uninterrupted, "checkpoint_written")] == ["interval"] * 4 + ["final"]
    assert events_of(uninterrupted, "train_stopped")[-1]["reason"] == "finished"


def test_a_run_killed_during_a_write_resumes_with_the_same_bits(
    uninterrupted: RunPaths, tmp_path: Path, make_run: MakeRun, start: Start, finish: Finish, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "writing", **_LONG)
    argv = ("--run-dir", os.fspath(run.root), "--attempt")
    process = start(_BAD_DISK, *argv, "1", processes=2, BAD_DISK="hang")
    _wait_for_steps(run, 120, process)  # training continues while the write hangs, since step 100
    half = run.checkpoints / ".tmp-step-00000100-attempt-0001"
    assert list(half.glob("*.safetensors"))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    finish(start("trainer", *argv, "2", processes=2))

    assert events_of(run, "train_started", 2)[0]["resumed_from_step"] == 50
    assert not events_of(run, "checkpoint_rejected")
    assert not half.exists()
    _assert_continues(run, uninterrupted, events_of)


def test_a_process_that_was_frozen_while_its_attempt_was_replaced_commits_nothing(
    tmp_path: Path, make_run: MakeRun, start: Start, finish: Finish, events_of: EventsOf
) -> None:
    train = {"tokens": 20_000 * 4 * 32, "global_batch_size": 4, "micro_batch_size": 1}
    run = make_run(tmp_path / "frozen", train=train, checkpoint={"every_steps": 50})
    log = tmp_path / "log"
    argv = ("trainer", "--run-dir", os.fspath(run.root), "--attempt", "1")
    process = start(*argv, log=log, PYTHONPROFILEIMPORTTIME="1")
    _wait_for_steps(run, 60, process)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    before = checkpoint_steps(run)
    fence.close(run, 1)
    process.send_signal(signal.SIGCONT)

    finish(process, RunBusyError.exit_code)
    said = log.read_text(encoding="utf-8")
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")}
    assert ("trainer.optim.adamw" in imported, "torch._dynamo" in imported) == (True, False), "PyTorch's compiler"
    assert "attempt 1 is over, so this process writes nothing more and ends" in said
    assert checkpoint_steps(run) == before
    assert not events_of(run, "train_stopped")


def test_write_error_of_one_process_reaches_all_at_the_next_save(
    tmp_path: Path, make_run: MakeRun, start: Start, finish: Finish, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "failing", **_LONG)
    ranks = _start_ranks(start, _BAD_DISK, "--run-dir", os.fspath(run.root), "--attempt", "1", BAD_DISK="fail")
    for process in ranks:
        assert "checkpoint of step 100 can't be written" in finish(process, StorageError.exit_code)
    (alarm,) = events_of(run, "alarm")
    assert (alarm["step"], alarm["what"]) == (100, "checkpoint_failed")
    assert "rank 1: OSError: Input/output error" in alarm["message"]
    assert max(event["step"] for event in events_of(run, "step")) == 150
    assert checkpoint_steps(run) == [50]


def test_sigterm_to_one_process_stops_all_with_a_checkpoint(
    uninterrupted: RunPaths, tmp_path: Path, make_run: MakeRun, start: Start, finish: Finish, events_of: EventsOf
) -> None:
    run = make_run(tmp_path / "stopped", **_LONG)
    argv = ("trainer", "--run-dir", os.fspath(run.root), "--attempt")
    ranks = _start_ranks(start, *argv, "1")
    _wait_for_steps(run, 60, ranks[0])
    ranks[1].send_signal(signal.SIGTERM)
    for process in ranks:
        finish(process, 75)

    (stopped,) = events_of(run, "train_stopped")
    written = events_of(run, "checkpoint_written")[-1]
    assert stopped["reason"] == written["reason"] == "stop"
    assert stopped["step"] == written["step"] < 240

    finish(start(*argv, "2", processes=2))
    assert events_of(run, "train_started", 2)[0]["resumed_from_step"] == stopped["step"]
    _assert_continues(run, uninterrupted, events_of)


def test_one_process_trains_like_two_and_resumes_from_their_checkpoint(
    uninterrupted: RunPaths, tmp_path: Path, make_run: MakeRun, train_here: TrainHere, events_of: EventsOf
) -> None:
    alone = {**_LONG, "cluster": {"processes_per_node": 1}}
    run = make_run(tmp_path / "alone", **alone)
    assert train_here(run, 1) == 0
    together = [event["loss"] for event in events_of(uninterrupted, "step")]
    assert [e["loss"] for e in events_of(run, "step")][:30] == pytest.approx(together[:30], rel=1e-4)

    shutil.copytree(uninterrupted.root, tmp_path / "fewer")
    fewer = make_run(tmp_path / "fewer", **alone)
    shutil.rmtree(fewer.checkpoint(240))
    assert train_here(fewer, 2) == 0
    again = events_of(fewer, "step", 2)
    assert [event["step"] for event in again] == list(range(201, 241))
    assert [event["loss"] for event in again] == pytest.approx(together[200:], rel=1e-4)
