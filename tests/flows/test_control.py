"""Asking running training for a profile: what is refused, and how the driver passes the request on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import conf.load
from conf.schema import BackendConfig, Config
from flows import control
from flows.runtime.amended import Orders
from flows.runtime.context import open_context
from flows.stages.attempt import training_job
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, HlatctlError, RunBusyError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import FLOW_WRITER, JournalWriter, read_events, train_writer
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import ProfileState
from tests.flows.conftest import Recorder


def make(composed: Config, folder: Path, **changes: Any) -> RunPaths:
    """Return a run on this machine that trains its 70th of 306 steps in attempt 1."""
    cluster = dataclasses.replace(composed.cluster, launcher="local", processes_per_node=2)
    config = dataclasses.replace(composed, runs_dir=str(folder), **{"cluster": cluster, **changes})
    run = RunPaths(folder / "run")
    run.root.mkdir(mode=0o700)
    files.write_text(run.config, files.seal_lines(conf.load.dump(config)))
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("run_created", run_id="run", simulated=False, argv=[])
        journal.attempt = 1
        journal.append("attempt_started", handle={"launcher": "local", "name": "train", "launch_dir": str(folder)})
    trained(run, "train_started", resumed_from_step=0, tokens=0)
    trained(run, "step", step=70, tokens=70 * 8192, loss=3.0)
    return run


def trained(run: RunPaths, kind: str, **fields: Any) -> None:
    with JournalWriter(run, train_writer(0), 1) as journal:
        journal.append(kind, **fields)


@pytest.fixture
def run(composed: Config, tmp_path: Path) -> Iterator[RunPaths]:
    made = make(composed, tmp_path)
    with hold_driver(made):
        yield made


def request(run: RunPaths, steps: int = 5, ranks: list[int] | None = None, memory: bool = True) -> ProfileState:
    return control.request_profile(run, steps=steps, ranks=[0] if ranks is None else ranks, memory=memory, by="ana")


def refused(run: RunPaths, **asked: Any) -> str:
    before = len(read_events(run))
    with pytest.raises(HlatctlError) as caught:
        request(run, **asked)
    assert caught.value.hint
    assert len(read_events(run)) == before, "nothing was written"
    return caught.value.message


def test_a_request_that_cannot_be_met_is_refused(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(run, steps=21) == "--steps=21: must be from 1 to 20; a trace has every operator"
    assert refused(run, ranks=[0, 2]) == "--ranks=0,2: the run has ranks 0 to 1"
    monkeypatch.setattr("flows.control.shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert "1000 bytes are free, and traces of 5 steps of 1 ranks can need" in refused(run)
    monkeypatch.undo()
    trained(run, "step", step=300, tokens=300 * 8192, loss=3.0)
    assert refused(run) == "--steps=5: training ends in 6 steps; a profile needs 4 besides its own"
    trained(run, "train_stopped", step=306, tokens=306 * 8192, reason="finished")
    assert refused(run) == "run run: no step is being trained now"


def test_a_run_that_no_profiler_of_pytorch_sees_is_refused(composed: Config, tmp_path: Path) -> None:
    (tmp_path / "neuron").mkdir()
    neuron = make(composed, tmp_path / "neuron", backend=BackendConfig(name="nxd", device="neuron"))
    assert "backend.name=nxd, backend.device=neuron: PyTorch's profiler does not see" in refused(neuron)
    simulated = make(composed, tmp_path, cluster=composed.cluster)
    assert refused(simulated) == "run run: is simulated, and no process trains"


def test_a_run_without_a_driver_is_refused(composed: Config, tmp_path: Path) -> None:
    assert refused(make(composed, tmp_path)) == "run run: no driver is running, so nothing trains"


def test_the_driver_passes_a_request_on_once_and_a_second_one_has_to_wait(
    composed: Config, tmp_path: Path, recorder: Recorder
) -> None:
    run = make(composed, tmp_path)
    ctx = open_context(run, recorder)
    with hold_driver(run):
        asked = request(run, ranks=[1, 0, 1], memory=False)
        assert refused(run) == "run run: profile 1 is being made, for ana"
        state = ctx.refresh()
        Orders(run, dataclasses.replace(state.attempts[0], number=2), ctx.clock).give(state, ctx.config)
        assert not run.orders(2).exists(), "it was asked of attempt 1"
        orders = Orders(run, state.attempts[0], ctx.clock)
        orders.give(state, ctx.config)
        order = {"number": 1, "steps": 5, "ranks": [0, 1], "memory": False}
        assert files.read_json(run.orders(1))["profile"] == order
        trained(run, "profiled", number=1, first_step=73, step=77, bytes=5000)
        *_, (step, made) = control.wait_for_profile(run, asked.number)
        assert (step, made.status, made.first_step, made.last_step, made.bytes) == (70, "done", 73, 77, 5000)
        assert request(run).number == 2
    ctx.close()


def test_a_request_fails_with_its_attempt_and_nothing_half_stays(run: RunPaths) -> None:
    asked = request(run)
    run.partial_profile(1).mkdir(parents=True)
    with JournalWriter(run, FLOW_WRITER, 1) as journal:
        journal.append("attempt_ended", cause="killed", evidence="", decision="restart")
    with pytest.raises(RunBusyError, match="profile 1 was not made: attempt 1 ended before"):
        list(control.wait_for_profile(run, asked.number))
    assert not run.partial_profile(1).exists()
    assert read_state(run).open_profile is None


def test_a_finished_run_is_refused_without_a_hint_to_resume_it(composed: Config, tmp_path: Path) -> None:
    run = make(composed, tmp_path)
    with JournalWriter(run, FLOW_WRITER, 1) as journal:
        journal.append("attempt_ended", cause="finished", evidence="", decision="done")
        journal.append("run_finished", outcome="finished")
    with pytest.raises(ConfigError, match="run run: is finished, so nothing trains") as caught:
        request(run)
    assert caught.value.hint == "`hlatctl runs --status running` lists the runs that train"


def test_an_attempt_that_ends_while_it_is_asked_gets_no_request(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: Any) -> None:
        with JournalWriter(run, FLOW_WRITER, 1) as journal:
            journal.append("attempt_ended", cause="killed", evidence="", decision="restart")

    monkeypatch.setattr(control, "_check_room", ends)
    with pytest.raises(ConfigError, match="no step is being trained now"):
        request(run)
    assert read_state(run).profiles == []


def test_waiting_ends_with_the_driver(composed: Config, tmp_path: Path) -> None:
    run = make(composed, tmp_path)
    with hold_driver(run):
        asked = request(run)
    with pytest.raises(RunBusyError, match="its driver has ended"):
        list(control.wait_for_profile(run, asked.number))


def test_collectives_of_a_gpu_that_time_out_leave_their_record_beside_the_logs(
    composed: Config, tmp_path: Path
) -> None:
    run = RunPaths(tmp_path)
    own: dict[str, Any] = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    gpu = dataclasses.replace(composed, backend=BackendConfig(device="cuda", env=own))
    env = training_job(gpu, run, 3).env
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == f"{run.logs(3)}/nccl-rank-"
    assert env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", "what the user sets is used"
    assert "TORCH_FR_DUMP_TEMP_FILE" not in training_job(composed, run, 3).env
