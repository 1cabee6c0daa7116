"""The journal of a flow, and the environment of its jobs."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

import conf.load
from conf.compose import compose
from conf.schema import Config
from flows.runtime.context import make_job, open_context
from hlatctl.run import files
from hlatctl.run.fold import read_state
from hlatctl.run.journal import FLOW_WRITER, JournalWriter, read_events, train_writer
from hlatctl.run.paths import RunPaths


def test_an_attempt_is_read_in_order_although_the_clock_was_set_back_before_it(
    composed: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, back_s, now_unix_s = RunPaths(tmp_path / "run"), [0.0], time.time
    run.root.mkdir(mode=0o700)
    cluster = dataclasses.replace(composed.cluster, launcher="local")
    files.write_text(run.config, files.seal_lines(conf.load.dump(dataclasses.replace(composed, cluster=cluster))))
    monkeypatch.setattr(time, "time", lambda: now_unix_s() - back_s[0])
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("run_created", run_id="run", simulated=False)
    ctx = open_context(run)

    def train(attempt: int, *steps: int) -> None:
        ctx.event("attempt_started", attempt=attempt, handle={})
        with JournalWriter(run, train_writer(0), attempt, now_unix_s=time.time) as journal:
            journal.append("train_started", resumed_from_step=steps[0] - 1, tokens=0)
            for step in steps:
                journal.append("step", step=step, tokens=step, loss=1.0)
        ctx.refresh()
        ctx.event("attempt_ended", attempt=attempt, cause="crashed", decision="restart")

    train(1, 1, 2, 3)
    back_s[0] = 7200.0
    train(2, 3, 4, 5)
    ctx.close()
    assert [event["attempt"] for event in read_events(run)][1:] == [1] * 6 + [2] * 6
    attempts = [(attempt.resumed_from_step, attempt.last_step) for attempt in read_state(run).attempts]
    assert attempts == [(0, 3), (2, 5)]


def test_a_single_process_keeps_the_users_threads_and_gives_its_cores_away_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(["cluster=local", "cluster.processes_per_node=2", "cluster.threads_per_process=3"])

    def openmp(*, distributed: bool = False) -> tuple[str | None, str | None]:
        env = make_job(config, RunPaths(tmp_path), "eval-1", distributed=distributed).env
        return env.get("OMP_NUM_THREADS"), env.get("OMP_WAIT_POLICY")

    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert openmp() == ("6", "passive")
    assert openmp(distributed=True) == ("3", None), "training has its cores alone"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert openmp() == ("1", "active")
    assert openmp(distributed=True) == ("3", None), "the configuration decides about training"


@pytest.mark.parametrize(
    ("override", "shared"),
    [
        ("cluster.processes_per_node=1", False),
        ("cluster.processes_per_node=2", True),
        ("backend.compile=true", True),
        ("parallel.data_parallel=fsdp", True),
        ("parallel.activation_checkpointing=full", True),
    ],
)
def test_processes_share_pytorchs_compiler_where_training_imports_it(
    override: str, shared: bool, tmp_path: Path
) -> None:
    config = compose(["cluster=local", "backend.compile=false", override])
    train = make_job(config, RunPaths(tmp_path), "train", "-m", "trainer", distributed=True)
    preflight = make_job(config, RunPaths(tmp_path), "preflight", "-m", "trainer.preflight", distributed=True)
    assert ("torch._dynamo" in train.shared_modules) == shared
    assert preflight.shared_modules == train.shared_modules, "training is forked from what the preflight has imported"
