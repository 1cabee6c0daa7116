"""What the driver says of the software that nodes report, and how a run waits for nodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.schema import Config, SimulationConfig
from flows import pretrain
from flows.launch.base import Job
from flows.simulation.cluster import Script, SimulatedCluster
from flows.simulation.jobs import SCRIPTS, argument
from flows.stages.preflight import _differences
from hlatctl.report.goodput import account
from hlatctl.run import files
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths
from tests.flows.conftest import Recorder


def test_software_that_differs_from_the_record_is_named_with_its_hosts(tmp_path: Path) -> None:
    ctx: Any = SimpleNamespace(run=RunPaths(tmp_path))
    node = {"torch": "2.9.0", "python": "3.11.7", "hlatctl": "0.5.0"}
    workers: list[dict[str, Any]] = [{"host": f"n{number}", "versions": node} for number in range(6)]
    workers.append({"host": "n0"})  # another process of a node
    assert _differences(ctx, workers) == [], "nothing was recorded"
    record = {"packages": {"torch": "2.13.0", "numpy": "2.0.0"}, "python": "3.11.7 (main, …) [GCC 12.2.0]"}
    files.write_json(ctx.run.provenance, record)
    assert _differences(ctx, workers) == [
        "n0, n1, n2, n3 and 2 more: torch 2.9.0, but the run's provenance.json has 2.13.0"
    ]


#: Time until the node of the test is repaired, in simulated seconds.
REPAIR_S = 3000.0


NO_SPARE = SimulationConfig(spare_nodes=0, person_s=0.0)


def one_of_two_breaks(config: Config, monkeypatch: pytest.MonkeyPatch, **recovery: Any) -> Config:
    """Let the second of two nodes break at the end of the first attempt; there is no spare one."""
    normal = SCRIPTS["train"]

    def breaks(cluster: SimulatedCluster, job: Job) -> Script:
        code = yield from normal(cluster, job)
        if argument(job, "--attempt") == "1":
            cluster.broken["simulated-1"] = cluster.clock.now_unix_s() + REPAIR_S
        return code

    monkeypatch.setitem(SCRIPTS, "train", breaks)
    return dataclasses.replace(
        config,
        cluster=dataclasses.replace(config.cluster, nodes=2, processes_per_node=1),
        recovery=dataclasses.replace(config.recovery, **recovery),
    )


@pytest.mark.processes
def test_a_run_that_trained_waits_in_the_queue_until_a_node_is_repaired(
    simulated_config: Config, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    run = pretrain.create(one_of_two_breaks(simulated_config, monkeypatch), argv=[], simulated=NO_SPARE)
    state = pretrain.drive(run, recorder)
    assert (state.status, state.queued) == ("finished", {})
    assert state.attempts[0].rejected_hosts == ["simulated-1"], "its end was a node's fault"
    waits = [event for event in read_events(run) if event.get("job") == "preflight"]
    assert {event["kind"] for event in waits} == {"job_queued", "job_left_queue"}
    assert waits[0]["reason"] == "simulated-1: not fit to train, and no spare node"
    assert waits[-1]["kind"] == "job_left_queue"
    assert waits[-1]["time_unix_s"] - waits[0]["time_unix_s"] == pytest.approx(REPAIR_S, abs=400)
    assert sum("no spare node, measuring again every 300 s" in message for message in recorder.messages) == 1
    assert account(read_events(run), state.steps).seconds["queued"] > 0
    assert sum(event["kind"] == "run_finished" for event in read_events(run)) == 1, "no person was needed"


@pytest.mark.processes
def test_a_run_waits_for_nodes_no_longer_than_it_may(simulated_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit_s in (0.0, 1000.0):
        config = one_of_two_breaks(simulated_config, monkeypatch, max_node_wait_s=limit_s)
        run = pretrain.create(config, argv=[], simulated=NO_SPARE)
        assert pretrain.drive(run).status == "finished", "a person has resumed it"
        kinds = [event["kind"] for event in read_events(run)]
        failed_at = kinds.index("run_finished")
        assert kinds[:failed_at].count("job_queued") == (3 if limit_s else 0)
        assert kinds[:failed_at].count("job_left_queue") == (3 if limit_s else 0)
