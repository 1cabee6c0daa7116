"""The flow on a full disk, when it is asked to stop while it waits, and when a stage's job is killed."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.schema import Config, SimulationConfig
from flows import control, pretrain
from flows.launch.base import Job
from flows.launch.local import LocalLauncher
from flows.recovery import node_ledger
from flows.runtime.context import open_context
from flows.simulation.cluster import Script, SimulatedCluster, VirtualClock
from flows.simulation.jobs import SCRIPTS, argument
from flows.stages.attempt import _Silence
from hlatctl.notices import Notice, append
from hlatctl.run import files
from hlatctl.run.errors import LaunchError, PreflightError, StoppedError, StorageError, dump_error
from hlatctl.run.fold import fold
from hlatctl.run.journal import OPERATOR_WRITER, Event, JournalWriter, read_events, train_writer
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import AttemptState
from tests.flows.conftest import Recorder

pytestmark = pytest.mark.processes


def of_kind(run: RunPaths, kind: str) -> list[Event]:
    return [event for event in read_events(run) if event["kind"] == kind]


def ask_to_stop(cluster: SimulatedCluster) -> None:
    with cluster.journal(OPERATOR_WRITER) as journal:
        journal.append("stop_requested", by="test")


def ends_with(code: int) -> Script:
    yield 1.0
    return code


def no_room(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def first(script: Callable[[SimulatedCluster, Job], Script], name: str) -> Callable[[SimulatedCluster, Job], Script]:
    """Return the script for the first job, then the normal one of that name."""
    normal, scripts = SCRIPTS[name], iter([script])
    return lambda cluster, job: next(scripts, normal)(cluster, job)


def test_training_that_cannot_write_events_on_a_full_disk_is_not_hung(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    normal = SCRIPTS["train"]

    def on_a_full_disk(cluster: SimulatedCluster, job: Job) -> Script:
        with cluster.journal(train_writer(0), int(argument(job, "--attempt"))) as journal:
            journal.append("warning", message="the last event that there is room for")
        for beat in range(1, 101):
            yield 100.0
            os.utime(journal.path, (beat, beat))
            cluster.clock.notify(job.name)
        return (yield from normal(cluster, job))

    monkeypatch.setitem(SCRIPTS, "train", first(on_a_full_disk, "train"))
    run = pretrain.create(simulated_config, argv=[])
    assert pretrain.drive(run).status == "finished"
    assert of_kind(run, "hang") == []


def test_time_in_which_the_driver_is_held_up_is_no_silence(tmp_path: Path) -> None:
    now_s = [0.0]
    clock = SimpleNamespace(monotonic_s=lambda: now_s[0])
    silence, newest = _Silence(RunPaths(tmp_path), clock), AttemptState(number=1, handle={}, started_unix_s=0.0)

    def after(seconds: float) -> float:
        now_s[0] += seconds
        return silence.length_s(newest, waits=False)

    assert [after(0.5), after(0.5), after(5000.0), after(0.5)] == [0.0, 0.5, 10.5, 11.0]


def test_after_wrong_numbers_the_run_continues_without_the_node_from_before_the_last_good_check(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(cluster: SimulatedCluster, job: Job) -> Script:
        yield 1.0
        with cluster.journal(train_writer(0), 1) as journal:
            journal.append("train_started", resumed_from_step=0)
            for step in (10, 20):
                journal.append("checkpoint_committed", step=step, manifest_sha256="")
            journal.append("corruption_checked", step=10, wall_s=1.0)
            journal.append("corruption_suspected", step=25, blamed_hosts=["simulated-1"], message="rank 1 is wrong")
        return 20

    monkeypatch.setitem(SCRIPTS, "train", first(wrong, "train"))
    cluster = dataclasses.replace(simulated_config.cluster, nodes=2)  # and two spare ones
    run = pretrain.create(dataclasses.replace(simulated_config, cluster=cluster), argv=[])
    assert pretrain.drive(run).status == "finished"
    ended, _finished = of_kind(run, "attempt_ended")
    assert (ended["cause"], ended["evidence"]) == ("corruption", "rank 1 is wrong")
    assert (ended["decision"], ended["max_checkpoint_step"]) == ("restart_without", 10)
    assert of_kind(run, "attempt_started")[1]["left_out_hosts"] == ["simulated-1"]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_node_that_is_taken_back_with_a_notice_is_replaced_without_blame(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch, recorder: Recorder, has_checkpoint: bool
) -> None:
    def noticed(cluster: SimulatedCluster, job: Job) -> Script:
        yield 1.0
        ends = cluster.clock.now_unix_s() + 120.0
        for notice in (
            Notice(what="rebalance", host="simulated-0", message="EC2 may end simulated-0"),
            Notice(what="spot", host="simulated-1", message="EC2 ends simulated-1", ends_unix_s=ends),
            *(Notice(what="spot", host=f"far-{n}", message=f"EC2 ends far-{n}", ends_unix_s=ends) for n in range(2047)),
        ):
            append(job.launch_dir / job.name, notice)
        with cluster.journal(train_writer(0), 1) as journal:
            journal.append("train_started", resumed_from_step=0)
            if has_checkpoint:
                journal.append("checkpoint_committed", step=10, manifest_sha256="")
                journal.append("train_stopped", step=10, reason="stop")
        return 0 if has_checkpoint else 137

    monkeypatch.setitem(SCRIPTS, "train", first(noticed, "train"))
    cluster = dataclasses.replace(simulated_config.cluster, nodes=2)  # and two spare ones
    written, record = list[int](), node_ledger.record

    def recorded(path: Path, entries: Iterable[node_ledger.Entry]) -> None:
        found = list(entries)
        written.append(sum(entry.kind == "leaving" for entry in found))
        record(path, found)

    monkeypatch.setattr(node_ledger, "record", recorded)
    run = pretrain.create(dataclasses.replace(simulated_config, cluster=cluster), argv=[])
    assert pretrain.drive(run, recorder).status == "finished"
    assert [(event["what"], len(event["hosts"])) for event in of_kind(run, "node_notice")] == [
        ("rebalance", 1),
        ("spot", 2048),
    ]
    assert [count for count in written if count] == [2048], "one write, however many nodes are taken back"
    ended, _finished = of_kind(run, "attempt_ended")
    spot = "EC2 ends simulated-1; the same for far-0, far-1, far-2, far-3, far-4, far-5, far-6, far-7 and 2,039 more"
    saved = "checkpoint written" if has_checkpoint else "it ended before it could write a checkpoint"
    assert (ended["cause"], ended["evidence"]) == ("reclaimed", f"{spot}; {saved}")
    assert (ended["decision"], ended["blamed_hosts"]) == ("restart_without", [])
    assert of_kind(run, "attempt_started")[1]["left_out_hosts"] == ["simulated-1"]


def test_without_a_spare_node_the_run_waits_until_the_node_is_gone_and_measures_what_replaced_it(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    def noticed(cluster: SimulatedCluster, job: Job) -> Script:
        yield 1.0
        ends = cluster.clock.now_unix_s() + 120.0
        notice = Notice(what="capacity", host="simulated-0", message="the capacity ends", ends_unix_s=ends)
        append(job.launch_dir / job.name, notice)
        return 137

    monkeypatch.setitem(SCRIPTS, "train", first(noticed, "train"))
    run = pretrain.create(simulated_config, argv=[], simulated=SimulationConfig(spare_nodes=0))
    assert pretrain.drive(run, recorder).status == "finished"
    (waiting,) = (message for message in recorder.messages if message.startswith("nodes: waiting"))
    assert waiting.endswith("until simulated-0 is taken back")
    assert "nodes: simulated-0 failed before; measuring again before the next attempt" in recorder.messages
    (ended, *_), (_, started, *_) = of_kind(run, "attempt_ended"), of_kind(run, "attempt_started")
    assert started["time_unix_s"] - ended["time_unix_s"] > 100


def test_an_attempt_that_made_no_step_hands_nothing_over(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCRIPTS, "train", first(lambda _cluster, _job: ends_with(137), "train"))
    run = pretrain.create(simulated_config, argv=[], simulated=SimulationConfig())
    assert pretrain.drive(run).status == "finished"
    stays = ["--stay" in (run.launch(number) / "train.sh").read_text() for number in (1, 2)]
    assert stays == [True, False]
    assert "--stay passed" in (run.launch(0) / "preflight.sh").read_text()


def test_an_attempt_starts_when_the_disk_has_room_for_its_event(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    run = pretrain.create(simulated_config, argv=[])
    ctx = open_context(run, recorder)
    path, full = ctx._journal.path, [True]
    ctx._journal._file.close()
    monkeypatch.setattr(ctx._journal, "_file", _Disk(path, full))
    ctx.event("attempt_started", attempt=1, handle={})
    assert ctx.state.attempt, "the flow has the event that is not on the disk"
    assert of_kind(run, "attempt_started") == []
    clock = ctx.clock
    assert isinstance(clock, VirtualClock)

    def free() -> None:
        full.clear()
        clock.notify("any")

    clock.at(clock.now_unix_s() + 60.0, free)
    ctx.require_journal()
    assert len(of_kind(run, "attempt_started")) == 1
    assert [m for m in recorder.messages if m.startswith("waiting until there is room on the disk")]
    ctx.close()


class _Disk:
    """A file on a disk that is full until the list is empty."""

    def __init__(self, path: Path, full: list[bool]) -> None:
        self._file, self._full = path.open("ab", buffering=0), full

    def write(self, data: bytes) -> int:
        return no_room() if self._full else self._file.write(data)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


def test_a_job_whose_files_do_not_fit_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(name="try", run_dir=tmp_path, argv=("-c", ""), launch_dir=tmp_path / "a", log_dir=tmp_path / "b")
    launcher = LocalLauncher()
    monkeypatch.setattr(files, "write_text", no_room)
    monkeypatch.setattr("flows.launch.local._spawn_session", lambda *_: pytest.fail("started"))
    with pytest.raises(StorageError, match=r"job try: .* can't be written \(No space left on device\)"):
        launcher.submit(launcher.render(job))


def test_a_stage_on_a_full_disk_is_an_error_with_a_hint(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pretrain.create(simulated_config, argv=[])
    monkeypatch.setattr("flows.stages.files.write_json", no_room)
    with pytest.raises(StorageError, match="can't be written") as caught:
        pretrain.drive(run)
    assert "free space" in caught.value.hint
    assert fold(read_events(run)).status == "failed"


def test_a_request_to_stop_that_cannot_be_written_names_the_driver_or_ends_the_job_of_a_dead_one(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pretrain.create(simulated_config, argv=[])

    class Full(JournalWriter):
        def append(self, *arguments: Any, **fields: Any) -> Event:
            self._file.close()
            self._file = _Disk(self.path, [True])  # type: ignore[assignment]
            return super().append(*arguments, **fields)

    monkeypatch.setattr(control, "JournalWriter", Full)
    with hold_driver(run), pytest.raises(StorageError) as caught:
        control.request_stop(run, by="test", wait_s=0)
    assert f"kill -INT {os.getpid()}" in caught.value.hint

    cancelled: list[str] = []
    launcher = SimpleNamespace(cancel=lambda job, **_: cancelled.append(job), release=cancelled.append)
    monkeypatch.setattr(control, "launcher_for", lambda _: launcher)
    monkeypatch.setattr(control, "live_training", lambda *_: "train")
    control.request_stop(run, by="test", wait_s=0)
    assert cancelled == ["train", run.root], "the nodes that the run keeps are given back"


def test_a_stop_during_the_back_off_starts_no_attempt(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(cluster: SimulatedCluster, job: Job) -> Script:
        yield 1.0
        cluster.clock.at(cluster.clock.now_unix_s() + 100.0, lambda: ask_to_stop(cluster))
        return 137

    monkeypatch.setitem(SCRIPTS, "train", first(dies, "train"))
    recovery = dataclasses.replace(simulated_config.recovery, backoff_s=200.0)
    run = pretrain.create(dataclasses.replace(simulated_config, recovery=recovery), argv=[])
    with pytest.raises(StoppedError, match="stopped on request"):
        pretrain.drive(run)
    assert len(of_kind(run, "attempt_started")) == 1
    assert fold(read_events(run)).status == "stopped"
    assert pretrain.drive(run).status == "finished"


def test_a_stop_during_the_last_evaluation_stops_the_run_and_resume_completes_it(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    normal, last = SCRIPTS["eval"], max(simulated_config.milestones.values())

    def asked_meanwhile(cluster: SimulatedCluster, job: Job) -> Script:
        if int(argument(job, "--milestone-tokens")) == last:
            cluster.clock.at(cluster.clock.now_unix_s() + 1.0, lambda: ask_to_stop(cluster))
            cluster.clock.at(cluster.clock.now_unix_s() + 2.0, lambda: cluster.clock.notify(job.name))
        return normal(cluster, job)

    run = pretrain.create(simulated_config, argv=[])
    with monkeypatch.context() as patch:
        patch.setitem(SCRIPTS, "eval", asked_meanwhile)
        with pytest.raises(StoppedError):
            pretrain.drive(run)
    state = fold(read_events(run))
    assert (state.status, state.step) == ("stopped", simulated_config.total_steps)
    assert (state.milestones[last].status, state.milestones[last].progress) == ("due", None)
    assert [event["milestone_tokens"] for event in of_kind(run, "eval_stopped")] == [last]
    state = pretrain.drive(run)
    assert (state.status, state.milestones[last].status) == ("finished", "evaluated")


@pytest.mark.parametrize("stage", ["preflight", "data", "compile", "warm"])
def test_a_stage_whose_job_is_killed_is_restarted(
    stage: str, simulated_config: Config, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    monkeypatch.setitem(SCRIPTS, stage, first(lambda cluster, job: ends_with(137), stage))
    run = pretrain.create(simulated_config, argv=[])
    assert pretrain.drive(run, recorder).status == "finished"
    (failed,) = of_kind(run, "stage_failed")
    assert (failed["stage"].split("_")[0], failed["restart"]) == (stage, True)
    assert any("failed with exit code 137" in message and "; restarting" in message for message in recorder.messages)


def test_stages_have_a_limit_of_restarts_and_crashes_are_not_restarted(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pretrain.create(simulated_config, argv=[])
    monkeypatch.setitem(SCRIPTS, "data", lambda cluster, job: ends_with(137))
    with pytest.raises(LaunchError, match=r"3 restarts did not help \(recovery.max_restarts_without_progress=3\)"):
        pretrain.drive(run)
    assert [event["restart"] for event in of_kind(run, "stage_failed")] == [True] * 3 + [False]
    monkeypatch.setitem(SCRIPTS, "data", lambda cluster, job: ends_with(1))
    with pytest.raises(LaunchError, match="a restart can't fix this"):
        pretrain.drive(run)
    assert len(of_kind(run, "stage_failed")) == 5


@pytest.mark.parametrize("says_why", [False, True])
def test_a_preflight_that_takes_too_long_names_its_own_error_or_else_the_key_of_its_limit(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch, says_why: bool
) -> None:
    def slow(cluster: SimulatedCluster, job: Job) -> Script:
        if says_why:
            dump_error(PreflightError("worker n4: run directory is not the same folder"), job.error_file)
        cluster.clock.at(cluster.clock.now_unix_s() + 130.0, lambda: cluster.clock.notify(job.name))
        yield 1000.0
        return 0

    monkeypatch.setitem(SCRIPTS, "preflight", slow)
    run = pretrain.create(simulated_config, argv=[])
    with pytest.raises((LaunchError, PreflightError)) as caught:
        pretrain.drive(run)
    if says_why:
        assert caught.value.message == "worker n4: run directory is not the same folder"
    else:
        assert caught.value.message.startswith("preflight.timeout_s=120: job preflight did not finish")
        assert f"`hlatctl resume {run.run_id} preflight.timeout_s=240` gives it more time" in caught.value.hint
