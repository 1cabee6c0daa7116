"""A dry run of two days: its failures, what the flow does about them, and that it is reproducible."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conf import folders, simulation
from conf.compose import compose
from conf.schema import Config, FailureRatesConfig, PastFailure, SimulationConfig
from conf.schema.simulation import FailureKind
from flows import forecast, pretrain
from flows.recovery import policy
from flows.simulation.cluster import CLUSTER_WRITER
from hlatctl.report import simulation_profile
from hlatctl.report.goodput import measure_goodput
from hlatctl.run.errors import TrainingError
from hlatctl.run.fold import fold, read_state
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths

pytestmark = pytest.mark.processes

NONE = FailureRatesConfig(**dict.fromkeys((f.name for f in dataclasses.fields(FailureRatesConfig)), 0.0))


def campaign(folder: Path) -> Config:
    """Two days on eight nodes, three milestones."""
    return compose(
        [
            "cluster=simulated",
            "cluster.nodes=8",
            "tracking=none",
            f"runs_dir={folder / 'runs'}",
            "train.max_steps=8640",
            "train.tokens=1B",
            "train.seq_len=512",
            "checkpoint.every_steps=180",
            "eval.every_tokens=24M",
            "train.on_nonfinite=rollback",
        ]
    )


def cluster(rates: FailureRatesConfig = NONE, **keys: Any) -> SimulationConfig:
    return SimulationConfig(**{"step_s": 20.0, "step_events": 100, "failures": rates, "shows_recovery": False, **keys})


def drive(config: Config, settings: SimulationConfig) -> RunPaths:
    run = pretrain.create(config, argv=[], run_id="campaign", simulated=settings)
    pretrain.drive(run)
    return run


def only(kind: str, per_1000_node_hours: float) -> FailureRatesConfig:
    return dataclasses.replace(NONE, **{kind: per_1000_node_hours})


@pytest.mark.parametrize(
    ("kind", "rate", "cause", "decisions"),
    [
        ("hardware", 8.0, "device_failed", {"restart", "restart_without", "walk_back"}),
        ("node", 8.0, "node_failed", {"restart", "restart_without", "walk_back"}),
        ("process", 8.0, "killed", {"restart", "walk_back"}),
        ("collective_timeout", 10.0, "collective_timeout", {"restart", "restart_without"}),
        ("hang", 10.0, "hang", {"restart", "restart_without"}),
        ("upgrade", 100.0, "preempted", {"restart"}),
        ("nan", 100.0, "rollback", {"restart"}),
    ],
)
def test_the_flow_finds_the_cause_of_each_failure(
    kind: str, rate: float, cause: str, decisions: set[str], tmp_path: Path
) -> None:
    run = drive(campaign(tmp_path), cluster(only(kind, rate)))
    events = read_events(run)
    state = fold(events)
    assert (state.status, state.simulated) == ("finished", True)
    assert any(event.get("failure") == kind and event["writer"] == CLUSTER_WRITER for event in events)
    causes = Counter(attempt.cause for attempt in state.attempts)
    assert set(causes) == {cause, "finished"}
    assert {attempt.decision for attempt in state.attempts[:-1]} <= decisions


def test_a_broken_node_is_replaced_by_a_spare_one(tmp_path: Path) -> None:
    state = fold(events := read_events(drive(campaign(tmp_path), cluster(only("hardware", 8.0)))))
    assert state.status == "finished"
    left_out = [event["left_out_hosts"] for event in events if event["kind"] == "attempt_started"]
    assert left_out[0] == []
    assert left_out[-1], "the last attempt did not use a node that had failed"


def test_a_lost_node_of_a_history_is_one_that_trains_then_and_comes_back_when_it_is_repaired(tmp_path: Path) -> None:
    history = [PastFailure(after_s=after_s, kind="node", node=0) for after_s in (600.0, 1200.0, 1800.0, 2400.0)]
    config = campaign(tmp_path)
    run = drive(config, cluster(history=history, spare_nodes=3, repair_s=1e6, start_s=60.0, node_detect_s=8.0))
    ends, begins = (
        [event for event in read_events(run) if event["kind"] == kind] for kind in ("attempt_ended", "train_started")
    )
    assert [event["cause"] for event in ends] == ["node_failed"] * 4 + ["finished"]
    assert len({*(event["blamed_hosts"][0] for event in ends[:4])}) == 4, "none is lost twice"
    restarted_s = [after["time_unix_s"] - end["time_unix_s"] for end, after in zip(ends, begins[1:], strict=False)]
    assert max(restarted_s[:3]) < 100.0 < 1e4 < restarted_s[3], "the fourth loss leaves too few nodes"
    assert [event["detect_s"] for event in ends[:4]] == pytest.approx([8.0] * 4, abs=25.0), "and a part of a step"


def test_after_a_node_was_replaced_a_killed_process_is_still_blamed_on_its_node(tmp_path: Path) -> None:
    kinds: list[FailureKind] = ["node", "process", "process"]
    history = [PastFailure(after_s=600.0 * n, kind=kind, node=7) for n, kind in enumerate(kinds, start=1)]
    events = read_events(drive(campaign(tmp_path), cluster(history=history, spare_nodes=4, repair_s=1e6)))
    failed = [event["host"] for event in events if event["kind"] == "failure_simulated"]
    blamed = [event["blamed_hosts"] for event in events if event["kind"] == "attempt_ended"]
    assert blamed == [*([host] for host in failed), []]
    assert len(set(failed)) == 3, "spare nodes took their place"
    assert sum(event["kind"] == "stage_started" and event["stage"] == "preflight" for event in events) == 1


def test_a_node_with_wrong_numbers_is_found_by_the_next_check_and_replaced(tmp_path: Path) -> None:
    config = campaign(tmp_path)
    recovery = dataclasses.replace(config.recovery, corruption_check_steps=500)
    run = drive(dataclasses.replace(config, recovery=recovery), cluster(only("flip_memory", 8.0)))
    events = read_events(run)
    state = fold(events)
    assert (state.status, {attempt.cause for attempt in state.attempts}) == ("finished", {"corruption", "finished"})
    flipped = next(event for event in events if event["kind"] == "failure_simulated")
    found = next(event for event in events if event["kind"] == "corruption_suspected")
    assert found["blamed_hosts"] == [flipped["host"]]
    assert 0 < found["time_unix_s"] - flipped["time_unix_s"] < 501 * 20.0
    first, second, *_others = (event for event in events if event["kind"] == "attempt_started")
    assert (first["left_out_hosts"], second["left_out_hosts"]) == ([], [flipped["host"]])
    checked = [event["step"] for event in events if event["kind"] == "corruption_checked" and event["attempt"] == 1]
    assert checked == list(range(0, found["step"], 500))


def test_after_a_driver_dies_the_next_one_re_attaches_to_running_training(tmp_path: Path) -> None:
    config = campaign(tmp_path)
    events = read_events(drive(config, cluster(only("head_crash", 100.0))))
    kinds = Counter(event["kind"] for event in events)
    assert kinds["head_started"] > 1
    assert kinds["attempt_attached"] >= 1
    assert (kinds["attempt_started"], kinds["attempt_ended"]) == (1, 1)
    assert measure_goodput(events, config, fold(events)).uptime_fraction == pytest.approx(1.0, abs=0.01)
    assert {m.status for m in fold(events).milestones.values()} == {"evaluated"}


def test_time_limits_and_a_maintenance_end_attempts_with_a_checkpoint(tmp_path: Path) -> None:
    times: dict[str, Any] = {"time_limit_s": 43_200, "maintenance_after_s": 72_000, "maintenance_s": 18_000}
    events = read_events(drive(campaign(tmp_path), cluster(NONE, start_s=60.0, **times)))
    ends = [event for event in events if event["kind"] == "attempt_ended"]
    assert [event["cause"] for event in ends] == ["preempted"] * 4 + ["finished"]
    begin_s = events[0]["time_unix_s"] + times["maintenance_after_s"]
    steps = [(event["time_unix_s"], event["step"]) for event in events if event["kind"] == "step"]
    assert len({step for _, step in steps}) == len(steps), "none is repeated"
    assert not [step for at_s, step in steps if begin_s + 1 < at_s < begin_s + times["maintenance_s"]]


def test_a_full_disk_at_a_milestone_stops_the_run_until_a_person_resumes_it(tmp_path: Path) -> None:
    events = read_events(drive(campaign(tmp_path), cluster(only("disk_full", 120.0))))
    causes = [event["cause"] for event in events if event["kind"] == "attempt_ended"]
    assert causes[-1] == "finished"
    assert set(causes) <= {"disk_full", "finished"}
    assert any(event["kind"] == "checkpoint_skipped" for event in events)


def test_the_parts_of_a_simulated_recovery_are_those_measured_in_another_run(tmp_path: Path) -> None:
    """What a profile says of a run, a simulation with that profile does: its own profile is the same."""
    measured: dict[str, Any] = {
        "step_s": 1.0,
        "data_wait_s": 0.25,
        "between_steps_s": 0.125,
        "detect_s": 3.0,
        "leave_s": 7.0,
        "end_hung_s": 9.0,
        "decide_s": 0.5,
        "place_s": 1.5,
        "start_s": 90.0,
        "warm_start_s": 11.0,
        "groups_s": 4.0,
        "load_s": 6.0,
        "first_step_s": 31.0,
        "preflight_s": 45.0,
    }
    config = campaign(tmp_path)
    train = dataclasses.replace(config.train, max_steps=1800)
    config = dataclasses.replace(config, train=train, recovery=dataclasses.replace(config.recovery, hang_floor_s=60.0))
    kinds: list[FailureKind] = ["process", "hang", "process", "upgrade"]
    history = [PastFailure(after_s=503.0 * n, kind=kind, node=n) for n, kind in enumerate(kinds, start=1)]
    run = drive(config, cluster(history=history, step_events=None, upgrade_s=0.0, **measured))
    events = read_events(run)
    state = fold(events)
    assert [attempt.cause for attempt in state.attempts] == ["killed", "hang", "killed", "preempted", "finished"]
    found = simulation_profile.profile(events, config, state)
    close = pytest.approx(measured, rel=0.1, abs=0.6)  # half a step, half a poll
    assert {name: found[name] for name in measured} == close
    (tmp_path / "simulation").mkdir()
    (tmp_path / "simulation" / "pilot.yaml").write_text(simulation_profile.text(found, state, run.run_id))
    with folders.using([tmp_path]):
        _, settings = simulation.split(["simulation=pilot"])
    assert (settings.load_s, settings.failures.hang) == (found["load_s"], found["failures"]["hang"])
    begun_s = [each["after_s"] for each in simulation_profile.history(state)]
    assert begun_s == pytest.approx([past.after_s for past in history], abs=1.5), "a step is the last sign of life"
    assert [each["kind"] for each in simulation_profile.history(state)] == kinds


def test_equal_seeds_give_equal_bytes_and_different_seeds_do_not(tmp_path: Path) -> None:
    config, rates = campaign(tmp_path), FailureRatesConfig(hardware=4.0, hang=2.0, head_crash=40.0, straggler=2.0)
    texts = []
    for seed in (1, 1, 2):
        journal = drive(config, cluster(rates, seed=seed)).journal
        texts.append({path.name: path.read_bytes() for path in sorted(journal.iterdir())})
        shutil.rmtree(config.runs_dir)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_events_of_many_steps_account_for_the_same_time_as_events_of_each_step(tmp_path: Path) -> None:
    accounts = []
    for step_events in (1, None):
        config = campaign(tmp_path / str(step_events))
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=3000))
        events = read_events(drive(config, cluster(only("hang", 30.0), step_events=step_events)))
        accounts.append(measure_goodput(events, config, fold(events)).seconds)
        assert max(event["step"] for event in events if event["kind"] == "step") == config.total_steps
    for category in ("productive", "lost", "restart:hang"):
        assert accounts[0][category] == pytest.approx(accounts[1][category], rel=0.03), category


def test_a_restart_policy_that_never_restarts_fails_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = policy.PolicyRule("stop", lambda case: case.cause != "finished", "broken on purpose")
    monkeypatch.setattr(policy, "POLICY", (broken, *policy.POLICY))
    with pytest.raises(TrainingError, match="broken on purpose"):
        drive(campaign(tmp_path), cluster(only("hang", 10.0)))


def test_without_automatic_restarts_the_run_waits_for_a_person(tmp_path: Path) -> None:
    config, settings = campaign(tmp_path), cluster(only("hang", 10.0))
    by_hand = dataclasses.replace(config, recovery=dataclasses.replace(config.recovery, enabled=False))
    automatic, waiting = forecast.play(config, settings), forecast.play(by_hand, settings)
    assert automatic.message == waiting.message == ""
    assert waiting.uptime_fraction < automatic.uptime_fraction - 0.05
    assert not list(tmp_path.iterdir()), "a forecast leaves no files"


def test_a_recorded_drill_has_nearly_the_goodput_of_the_real_run(tmp_path: Path) -> None:
    """The run lasted 782 s; its goodput and uptime are in the profile's first line."""
    _, settings = simulation.split(["simulation=drill"])
    words = "experiment=drill cluster=local cluster.nodes=1 cluster.processes_per_node=2 tracking=none "
    words += f"backend.compile=false recovery.hang_floor_s=20 train.max_steps=3250 runs_dir={tmp_path}"
    config = compose([*words.split(), simulation.OVERRIDE])
    run = drive(config, dataclasses.replace(settings, shows_recovery=False, step_events=1))
    events = read_events(run)
    state = fold(events)
    assert [attempt.cause for attempt in state.attempts].count("killed") == 7
    found = measure_goodput(events, config, state)
    assert found.training_s == pytest.approx(782, rel=0.03)
    assert found.ettr_fraction == pytest.approx(0.8341, abs=0.02)
    assert found.uptime_fraction == pytest.approx(0.8607, abs=0.03)


def test_with_copies_in_memory_a_lost_node_costs_the_steps_since_the_newest_copy(tmp_path: Path) -> None:
    """Without a spare node, they are lost with the nodes that the run gives up."""
    redone = []
    for copies, spare in ((None, 4), (20, 4), (20, 0)):
        config = campaign(tmp_path / f"{copies}-{spare}")
        cluster_of = dataclasses.replace(config.cluster, spare_nodes=spare)
        checkpoint = dataclasses.replace(config.checkpoint, memory_every_steps=copies)
        settings = cluster(only("hardware", 8.0), spare_nodes=spare)
        run = drive(dataclasses.replace(config, cluster=cluster_of, checkpoint=checkpoint), settings)
        attempts = read_state(run).attempts
        pairs = [  # an attempt, and the next one
            pair for pair in itertools.pairwise(attempts) if pair[0].cause == "device_failed" and pair[0].last_step
        ]
        assert pairs
        redone.append(max(before.last_step - (after.resumed_from_step or 0) for before, after in pairs))
    assert redone[0] > 60
    assert redone[1] < 20
    assert redone[2] > 60
