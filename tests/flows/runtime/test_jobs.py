"""Jobs of a run: events and messages while they wait in a queue, logs of failed ones, and results that runs share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from conf.fingerprint import data_fingerprint
from conf.schema import Config
from flows import control, pretrain
from flows.launch.base import Job, Status
from flows.runtime.context import FlowContext, cache_root, open_context
from flows.runtime.jobs import JobWatch, alone, ending_of, job_error, run_job
from flows.stages.data import prepare_data
from hlatctl.run import files
from hlatctl.run.errors import StoppedError
from hlatctl.run.fold import fold
from hlatctl.run.journal import read_events
from hlatctl.run.state import RunState
from tests.flows.conftest import Recorder
from tests.waiting import WAIT_S


class Context:
    """The part of a flow's context that is used, with the events in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"kind": "attempt_started", "attempt": 1, "seq": 0, "time_unix_s": 0.0, "handle": {}}
        ]
        self.messages: list[str] = []

    @property
    def state(self) -> RunState:
        return fold(self.events)

    def event(self, kind: str, **fields: Any) -> None:
        number = len(self.events)
        self.events.append({"kind": kind, "attempt": 1, "seq": number, "time_unix_s": float(number), **fields})

    def message(self, text: str) -> None:
        self.messages.append(text)


def watch(ctx: Context, *, started: bool = False) -> JobWatch:
    return JobWatch(ctx, "train", "attempt 1", started=started)  # type: ignore[arg-type]


@pytest.fixture
def ctx() -> Context:
    return Context()


def test_a_wait_is_told_once_for_each_reason_and_the_hosts_at_the_start(ctx: Context) -> None:
    job = watch(ctx)
    for reason in ("None", "Priority", "Priority", "Resources", "None"):
        job.saw(Status(state="queued", reason=reason, expected_start_unix_s=60.0))
    assert job.waits
    assert ctx.state.queued["train"].reason == "Resources"
    for _ in range(2):
        job.saw(Status(state="running", hosts=("n1", "n2")))
    assert not job.waits
    assert ctx.state.queued == {}
    assert ctx.state.attempts[0].hosts == ["n1", "n2"]
    assert ctx.messages == [
        "attempt 1: queued (Priority), expected to start at 1970-01-01 00:01:00 UTC",
        "attempt 1: queued (Resources), expected to start at 1970-01-01 00:01:00 UTC",
        "attempt 1: runs on n1, n2",
    ]


def test_the_next_driver_knows_that_the_job_waits(ctx: Context) -> None:
    watch(ctx).saw(Status(state="queued", reason="Priority"))
    ctx.event("head_started", pid=1, host="login")
    job = watch(ctx)
    assert job.waits
    job.saw(Status(state="queued", reason="Priority"))
    assert [event["kind"] for event in ctx.events].count("job_queued") == 1
    job.ended()
    assert ctx.state.queued == {}


def test_a_suspended_job_waits_until_it_runs_again(ctx: Context) -> None:
    job = watch(ctx, started=True)
    job.saw(Status(state="queued", reason="suspended"))
    assert ctx.state.queued["train"].reason == "suspended"
    for _ in range(2):
        job.saw(Status(state="running", hosts=("n1",)))
    assert ctx.state.queued == {}
    assert ctx.messages == ["attempt 1: queued (suspended)", "attempt 1: runs on n1"]


def test_a_silent_scheduler_is_told_once_and_changes_nothing(ctx: Context) -> None:
    job = watch(ctx, started=True)
    for state in ("running", "unknown", "unknown", "running"):
        job.saw(Status(state=state, hosts=("n1",) if state == "running" else ()))
    assert ctx.messages == ["attempt 1: the scheduler does not answer", "attempt 1: the scheduler answers again"]


def test_a_launcher_without_a_queue_adds_no_events(ctx: Context) -> None:
    job = watch(ctx)
    job.saw(Status(state="running"))
    job.ended()
    assert len(ctx.events) == 1
    assert ctx.messages == []


def test_the_reason_is_read_from_the_log_of_the_node_to_blame(tmp_path: Path) -> None:
    job = Job(name="train", run_dir=tmp_path, argv=(), launch_dir=tmp_path, log_dir=tmp_path, nodes=3)
    job.log.write_text("[rank0]: RuntimeError: Connection closed by peer [10.0.0.7]:3\n")
    (tmp_path / "train.node-2.log").write_text("[rank5]: ValueError: the reason\n[rank4]: ended\n")
    (tmp_path / "train.node-1.log").write_text("[rank2]: KeyError: of another node\n")
    status = Status(state="failed", exit_code=1, hosts=("a", "b", "c"), blamed_hosts=("c",))
    assert job_error(job, status).message == "job train: failed with exit code 1 (ValueError: the reason)"
    alone = Status(state="failed", exit_code=1, hosts=("a",), blamed_hosts=("a",))
    assert "Connection closed by peer" in job_error(job, alone).message


def test_the_node_of_a_killed_process_is_to_blame_even_if_another_node_ends_first(tmp_path: Path) -> None:
    job = Job(name="train", run_dir=tmp_path, argv=(), launch_dir=tmp_path, log_dir=tmp_path, nodes=3)
    summary = "Root Cause (first observed failure):\n  host      : localhost\n  exitcode  : {} (pid: 7)\n"
    broken = "[rank0]: RuntimeError: Connection reset by peer [10.0.0.7]:3\n" + summary.format(1)
    job.log.write_text(broken)
    (tmp_path / "train.node-1.log").write_text(broken)
    (tmp_path / "train.node-2.log").write_text(summary.format(-9))
    first = Status(state="failed", exit_code=1, hosts=("a", "b", "c"), blamed_hosts=("a",))
    status, _ = ending_of(job, first)
    assert status.blamed_hosts == ("c",)
    assert job_error(job, first).code == "killed"
    job.log.write_text("[rank0]: ValueError: the reason\n" + summary.format(1))
    assert ending_of(job, first)[0] == first, "it names a cause of its own"


def test_the_last_line_of_a_log_is_no_cause(tmp_path: Path) -> None:
    job = Job(name="eval-1", run_dir=tmp_path, argv=(), launch_dir=tmp_path, log_dir=tmp_path)
    job.log.write_text("piqa: acc 0.4 ± 0.01 (2.0 s)\n")
    lost = job_error(job, Status(state="lost")).message
    assert lost == "job eval-1: was lost (the job's process is gone and left no exit code)"
    killed = job_error(job, Status(state="failed", exit_code=137)).message
    assert killed == "job eval-1: failed with exit code 137 (the job died of signal 9)"
    failed = job_error(job, Status(state="failed", exit_code=3)).message
    assert failed == "job eval-1: failed with exit code 3 (its last output: piqa: acc 0.4 ± 0.01 (2.0 s))"


class Waiter(Recorder):
    """Tells when a run waits for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def message(self, text: str) -> None:
        super().message(text)
        if "waiting for" in text:
            self.waits.set()


@contextmanager
def run(config: Config, name: str, observer: Recorder) -> Iterator[FlowContext]:
    paths = pretrain.create(config, argv=[], run_id=name)
    files.write_json(paths.provenance, {})
    with closing(open_context(paths, observer)) as ctx:
        yield ctx


@pytest.fixture
def folder(simulated_config: Config) -> Path:
    return cache_root(simulated_config) / "data" / data_fingerprint(simulated_config)


def test_a_run_waits_for_another_that_prepares_the_same_corpus_and_uses_it(
    simulated_config: Config, folder: Path
) -> None:
    waiter = Waiter()
    with run(simulated_config, "first", Recorder()) as first, run(simulated_config, "second", waiter) as second:
        with alone(first, folder, "data"):
            thread = threading.Thread(target=prepare_data, args=[second])
            thread.start()
            assert waiter.waits.wait(WAIT_S)
            run_job(first, first.job("data", "-m", "trainer.data.prepare", "--to", os.fspath(folder)))
        thread.join(WAIT_S)
        assert [event["stage"] for event in read_events(second.run) if event["kind"] == "stage_finished"] == ["data"]
        assert second.run.dataset.is_file()
        assert not (second.run.launch(0) / "data.sh").exists()
    assert len([text for text in waiter.messages if "waiting for" in text]) == 1


def test_a_run_that_waits_for_another_can_be_stopped(simulated_config: Config, folder: Path) -> None:
    waiter, stopped = Waiter(), threading.Event()

    def wait() -> None:
        with pytest.raises(StoppedError):
            prepare_data(second)
        stopped.set()

    with run(simulated_config, "first", Recorder()) as first, run(simulated_config, "second", waiter) as second:
        with alone(first, folder, "data"):
            thread = threading.Thread(target=wait)
            thread.start()
            assert waiter.waits.wait(WAIT_S)
            control.request_stop(second.run, by="test", wait_s=0)
            thread.join(WAIT_S)
        assert stopped.is_set()
