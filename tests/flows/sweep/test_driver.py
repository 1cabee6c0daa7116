"""A sweep on the simulated cluster: every trial runs once even if drivers die; pruning; extending a sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf import simulation
from conf.schema import SimulationConfig
from flows.launch.base import Job
from flows.simulation.cluster import Script, SimulatedCluster
from flows.simulation.jobs import SCRIPTS
from flows.sweep import create
from flows.sweep.book import Book
from flows.sweep.driver import drive
from hlatctl.report.sweep import arms
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, RunBusyError, RunExistsError, StoppedError, TrainingError
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter, read_events
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.runs import find_sweep
from hlatctl.run.sweep import SweepState, fold
from hlatctl.run.sweep import apply as apply_to_sweep
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
SMALL = (
    "eval.enabled=false",
    "train.max_steps=24",
    "train.tokens=1M",
    "checkpoint.every_steps=12",
    "train.global_batch_size=4",
    "train.seq_len=256",
    "recovery.backoff_s=0",
    "tracking=none",
)
RATES = "optimizer.lr=1e-3,3e-3,1e-2"


def silent(text: str) -> None:
    pass


def make(runs_dir: Path, *arguments: str, sweep_id: str = "s") -> SweepPaths:
    prepared = create.prepare([*SMALL, f"runs_dir={runs_dir}", *arguments], folder=runs_dir, simulated=True)
    return create.make(prepared, sweep_id=sweep_id, argv=["hlatctl", "sweep"])


def state_of(sweep: SweepPaths) -> SweepState:
    return fold(read_events(sweep))


def kinds(run: RunPaths) -> Counter[str]:
    return Counter(str(event["kind"]) for event in read_events(run))


def test_every_arm_is_tried_with_every_seed_and_the_best_comes_first(tmp_path: Path) -> None:
    sweep = make(tmp_path, RATES, "optimizer.beta2=0.9,0.99", "sweep.seeds=2", "simulation.seed=7")
    state = drive(sweep, silent)
    assert (state.status, state.count("finished"), state.trials_planned) == ("finished", 12, 12)
    points = [tuple(trial.point.values()) for trial in state.trials.values() if trial.seed == 1234]
    assert points == [(lr, beta) for lr in ("0.001", "0.003", "0.01") for beta in ("0.9", "0.99")]
    assert {trial.seed for trial in state.trials.values()} == {1234, 1235}
    best = arms(state)[0]
    assert best.point["optimizer.lr"] == "0.003"
    assert best.mean == pytest.approx(sum(best.values) / 2)
    assert best.stderr == pytest.approx(abs(best.values[0] - best.values[1]) / 2)
    trial = state.trials[best.trials[1].number]
    config = files.unseal_lines(sweep.trial(trial.number).config.read_text(encoding="utf-8"))[0]
    assert "seed: 1235" in config
    assert trial.overrides[-3:] == ["optimizer.lr=0.003", "optimizer.beta2=0.9", "seed=1235"]
    created = next(event for event in read_events(sweep.trial(3)) if event["kind"] == "run_created")
    assert (created["sweep"], created["trial"], created["simulated"]) == ("s", 3, True)
    assert simulation.of_run(sweep.trial(3)) == SimulationConfig(seed=7, shows_recovery=False)


def test_every_trial_runs_once_though_drivers_are_killed_at_any_event(tmp_path: Path) -> None:
    sweep = make(
        tmp_path,
        RATES,
        "sweep.seeds=2",
        "sweep.pruner=median",
        "sweep.startup_trials=1",
        "recovery.max_restarts_without_progress=10",  # a simulated job dies with its driver
    )
    died = subprocess.run(
        [sys.executable, "-m", "tests.flows.sweep.killed_drivers", os.fspath(sweep.root), "7", "10"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert died.returncode == 0, died.stderr
    assert int(died.stdout) >= 6, "it died often enough to prove something"
    events = read_events(sweep)
    asked = [event["trial"] for event in events if event["kind"] == "trial_asked"]
    ended = [event["trial"] for event in events if event["kind"] == "trial_ended"]
    assert asked == list(range(6))
    assert sorted(ended) == list(range(6))
    state = fold(events)
    assert state.count("finished", "pruned") == 6
    assert len({(*trial.point.values(), trial.seed) for trial in state.trials.values()}) == 6
    # A driver that was killed while it created a run leaves a hidden folder.
    runs = sorted(path.parent.name for path in tmp_path.glob("[!.]*/config.yaml"))
    assert runs == [sweep.trial(number).run_id for number in range(6)]
    for number in range(6):
        assert kinds(sweep.trial(number))["run_created"] == 1
        steps = [e["step"] for e in read_events(sweep.trial(number)) if e["kind"] == "train_stopped"]
        finished = state.trials[number].status == "finished"
        assert steps.count(24) == finished, "no trial was trained to its end twice"
    assert drive(sweep, silent).status == "finished", "a finished sweep is left alone"
    assert len(read_events(sweep)) == len(events)


def test_a_trial_that_falls_behind_is_pruned_and_the_saved_hours_are_journalled(tmp_path: Path) -> None:
    sweep = make(
        tmp_path,
        "optimizer.lr=3e-3,4e-3,2e-3,1e-5,9e-1",
        "sweep.pruner=median",
        "sweep.startup_trials=2",
        "sweep.rungs=4",
    )
    state = drive(sweep, silent)
    assert {state.trials[n].status for n in (3, 4)} == {"pruned"}
    assert state.trials[0].status == "finished"
    pruned = state.trials[3]
    assert pruned.why.startswith("median at ")
    assert pruned.saved_process_hours > 0
    assert pruned.tokens < 24 * 1024
    run = sweep.trial(3)
    assert not list(run.checkpoints.glob("step-*")), "its checkpoints are dropped"
    assert kinds(run)["checkpoint_deleted"] >= 1


def test_a_trial_whose_evaluations_fall_behind_after_its_training_is_pruned_and_not_failed(tmp_path: Path) -> None:
    sweep = make(tmp_path, "optimizer.lr=3e-3,1e-5", "sweep.pruner=asha", "eval.enabled=true", "eval.every_tokens=4096")
    state = drive(sweep, silent)
    assert [trial.status for trial in state.trials.values()] == ["finished", "pruned"]
    assert state.trials[1].why.startswith("asha at 4,096 tokens")


def test_checkpoints_of_pruned_trials_are_kept_on_request(tmp_path: Path) -> None:
    sweep = make(tmp_path, "optimizer.lr=3e-3,4e-3,1e-5", "sweep.pruner=asha", "sweep.keep_pruned_checkpoints=true")
    state = drive(sweep, silent)
    assert state.trials[2].status == "pruned"
    assert list(sweep.trial(2).checkpoints.glob("step-*"))


def test_more_values_extend_a_sweep_and_other_changes_are_refused(tmp_path: Path) -> None:
    sweep = make(tmp_path, "optimizer.lr=1e-3,3e-3")
    drive(sweep, silent)
    before = [sweep.trial(number).config.stat().st_mtime_ns for number in range(2)]
    prepared = create.prepare_more(sweep, ["optimizer.lr=3e-3,1e-3,5e-3", "sweep.parallel=2"])
    create.extend(sweep, prepared, argv=[])
    state = drive(sweep, silent)
    assert [trial.point["optimizer.lr"] for trial in state.trials.values()] == ["0.001", "0.003", "0.005"]
    assert [sweep.trial(number).config.stat().st_mtime_ns for number in range(2)] == before
    for arguments, message in (
        (["optimizer.lr=1e-3,5e-3"], "it has tried 0.003 too, which is missing here"),
        (["optimizer.beta2=0.9,0.99"], "its axes are optimizer.lr"),
        (["optimizer.lr=1e-3"], "it has tried 0.001, 0.003, 0.005"),
        (["sweep.objective=loss@tokens=1000"], "it was created with None"),
    ):
        with pytest.raises(ConfigError, match=r"changes the sweep's search space") as caught:
            create.prepare_more(sweep, arguments)
        assert message in caught.value.message


def test_drawn_arms_are_the_same_whether_or_not_a_driver_died(tmp_path: Path) -> None:
    space = (
        "optimizer.lr=tag(log,interval(1e-4,1e-1))",
        "model.num_layers=int(interval(1,3))",
        "sweep.trials=6",
        "sweep.sampler=random",
    )
    whole = drive(make(tmp_path / "a", *space), silent)
    sweep = make(tmp_path / "b", *space)
    for _ in range(3):  # a driver that asks for one more trial and dies
        book = Book(sweep)
        book.ask()
        book.close()
    again = drive(sweep, silent)
    points = [trial.point for trial in whole.trials.values()]
    assert points == [trial.point for trial in again.trials.values()]
    assert all(1e-4 <= float(point["optimizer.lr"]) <= 1e-1 for point in points)
    assert {point["model.num_layers"] for point in points} <= {"1", "2", "3"}


def _fails(cluster: SimulatedCluster, job: Job) -> Script:
    yield 1.0
    return 1


def test_a_trial_that_fails_is_marked_and_the_sweep_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = SCRIPTS["train"]

    def breaks(cluster: SimulatedCluster, job: Job) -> Script:
        return _fails(cluster, job) if cluster.config.optimizer.lr == 3e-3 else play(cluster, job)

    monkeypatch.setitem(SCRIPTS, "train", breaks)
    state = drive(make(tmp_path, RATES), silent)
    assert [trial.status for trial in state.trials.values()] == ["finished", "failed", "finished"]
    assert "training stopped at step 0" in state.trials[1].why
    monkeypatch.setitem(SCRIPTS, "train", _fails)
    with pytest.raises(TrainingError, match=r"every trial failed; t-t0000: training stopped at step 0"):
        drive(make(tmp_path, RATES, sweep_id="t"), silent)


def test_a_stopped_sweep_pauses_its_trials_and_continues_them_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, play = make(tmp_path, "optimizer.lr=1e-3,3e-3"), SCRIPTS["train"]

    def stopped(cluster: SimulatedCluster, job: Job) -> Script:
        with suppress(RunBusyError), JournalWriter(sweep, OPERATOR_WRITER) as journal:
            journal.append("stop_requested", by="somebody")
        wait_for(lambda: kinds(cluster.run)["stop_requested"])
        return play(cluster, job)

    with monkeypatch.context() as patch:
        patch.setitem(SCRIPTS, "train", stopped)
        with pytest.raises(StoppedError, match=r"sweep s: stopped, \d of 2 trials: \d paused"):
            drive(sweep, silent)
    state = state_of(sweep)
    assert (state.status, state.trials[0].status) == ("stopped", "paused")
    state = drive(sweep, silent)
    assert (state.status, state.count("finished")) == ("finished", 2)
    assert kinds(sweep.trial(0))["run_created"] == 1


def test_a_trial_that_a_person_stops_counts_as_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = SCRIPTS["train"]

    def stopped_by_hand(cluster: SimulatedCluster, job: Job) -> Script:
        if cluster.config.optimizer.lr == 3e-3:
            with JournalWriter(cluster.run, OPERATOR_WRITER) as journal:
                journal.append("stop_requested", by="somebody")
        return play(cluster, job)

    monkeypatch.setitem(SCRIPTS, "train", stopped_by_hand)
    state = drive(make(tmp_path, RATES), silent)
    assert [trial.status for trial in state.trials.values()] == ["finished", "pruned", "finished"]
    assert state.trials[1].why == "stopped by hand"


def test_no_more_trials_than_the_sweep_says_run_at_once(tmp_path: Path) -> None:
    sweep = make(tmp_path, RATES, "sweep.parallel=1")
    drive(sweep, silent)
    order = [e["kind"] for e in read_events(sweep) if e["kind"] in ("trial_started", "trial_ended")]
    assert order == ["trial_started", "trial_ended"] * 3


def test_a_trial_whose_driver_dies_three_times_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.sweep.driver._POLL_S", 0.01)
    monkeypatch.setattr("flows.tracking.prefect_sweep.PrefectView.begin", lambda self: None)
    monkeypatch.setattr("flows.sweep.report.build", lambda sweep: sweep.report)
    monkeypatch.setattr("flows.runtime.programs.start_driver", lambda run, env: subprocess.Popen(["true"]))
    ended: list[str] = []
    monkeypatch.setattr("flows.control.request_stop", lambda run, by, wait_s: ended.append(run.run_id))
    prepared = create.prepare([*SMALL, f"runs_dir={tmp_path}", RATES], folder=tmp_path, simulated=False)
    sweep = create.make(prepared, sweep_id="s", argv=[])
    with pytest.raises(TrainingError, match=r"s-t0000: its driver died 3 times, see its logs/head.log"):
        drive(sweep, silent)
    assert kinds(sweep)["trial_head_lost"] == 9
    assert ended == ["s-t0000", "s-t0001", "s-t0002"], "a job that the drivers left would run beside the next trial"
    assert state_of(sweep).status == "failed"


def test_a_driver_in_a_job_hands_its_trials_over_and_counts_no_death_of_their_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.sweep.driver._POLL_S", 0.01)
    monkeypatch.setattr("flows.tracking.prefect_sweep.PrefectView.begin", lambda self: None)
    monkeypatch.setattr("flows.sweep.report.build", lambda sweep: sweep.report)
    monkeypatch.setenv("HLATCTL_DRIVER_JOB", "t")
    started: list[subprocess.Popen[bytes]] = []

    def start(run: RunPaths, env: dict[str, str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    def sleep(duration_s: float) -> None:
        """Get SIGTERM here: anywhere else, its exception can leave a file open, or end a worker of pytest."""
        assert callable(signal.getsignal(signal.SIGTERM))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("flows.runtime.programs.start_driver", start)
    arguments = [*SMALL, f"runs_dir={tmp_path}", "optimizer.lr=1e-3,3e-3", "sweep.parallel=2"]
    sweep = create.make(create.prepare(arguments, folder=tmp_path, simulated=False), sweep_id="s", argv=[])
    try:
        with monkeypatch.context() as patch:
            patch.setattr("flows.sweep.driver.time", SimpleNamespace(sleep=sleep))
            with pytest.raises(SystemExit):
                drive(sweep, silent)
        assert [driver.wait(WAIT_S) for driver in started] == [-signal.SIGTERM] * 2
    finally:
        for driver in started:
            driver.kill()

    # The next job finds drivers whose leases are not stale yet, and which died with the last job's node.
    found = iter((1, 1))
    monkeypatch.setattr("flows.sweep.driver.driver_pid", lambda run: next(found, None))
    again: list[str] = []

    def dies(run: RunPaths, env: dict[str, str]) -> subprocess.Popen[bytes]:
        again.append(run.run_id)
        return subprocess.Popen(["true"])

    monkeypatch.setattr("flows.control.request_stop", lambda run, by, wait_s: None)
    monkeypatch.setattr("flows.runtime.programs.start_driver", dies)
    with pytest.raises(TrainingError, match=r"its driver died 3 times"):
        drive(sweep, silent)
    assert Counter(again) == {"s-t0000": 3, "s-t0001": 3}


def test_an_arm_of_a_real_sweep_is_never_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.tracking.prefect_sweep.PrefectView.begin", lambda self: None)
    monkeypatch.setattr("flows.sweep.create.refuse_simulation", lambda config, hint: None)  # as for arms that are drawn
    arguments = [*SMALL, f"runs_dir={tmp_path}", "cluster=simulated", RATES]
    sweep = create.make(create.prepare(arguments, folder=tmp_path, simulated=False), sweep_id="s", argv=[])
    with pytest.raises(TrainingError, match=r"s-t0000: cluster\.launcher=simulated: simulates jobs and starts none"):
        drive(sweep, silent)


def test_an_id_is_taken_once_and_a_sweep_is_found_by_the_beginning_of_its_name(tmp_path: Path) -> None:
    sweep = make(tmp_path, RATES, sweep_id="rates")
    with pytest.raises(RunExistsError, match="--sweep-id=rates: exists"):
        make(tmp_path, RATES, sweep_id="rates")
    assert find_sweep(tmp_path, "rat") == sweep
    assert find_sweep(tmp_path, "rates-t0001") is None


def test_unknown_kinds_of_events_are_ignored() -> None:
    state = SweepState()
    apply_to_sweep(state, {"kind": "of the future", "time_unix_s": 1.0})
    assert state == SweepState(last_event_unix_s=1.0)
