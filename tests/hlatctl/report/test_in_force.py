from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conf.schema import ClusterConfig, Config
from hlatctl.report.in_force import mean_paid_nodes, mean_processes, size_since_step, value_of
from hlatctl.run.state import AmendmentState, AttemptState, RunState

#: As it is now: four nodes. It was created with two and had one for a while.
CONFIG = Config(cluster=ClusterConfig(nodes=4, processes_per_node=8, spare_nodes=1))


@pytest.fixture
def state() -> RunState:
    changes: tuple[dict[str, list[Any]], ...]
    changes = ({"cluster.nodes": [2, 1]}, {"optimizer.lr": [1e-3, 1e-4]}, {"cluster.nodes": [1, 4]})
    amendments = [
        AmendmentState(number, 0.0, change, applied_step=100 * number) for number, change in enumerate(changes, start=1)
    ]
    attempts = [
        AttemptState(1, {}, started_unix_s=1000.0),
        AttemptState(2, {}, started_unix_s=1600.0, config_number=1),
        AttemptState(3, {}, started_unix_s=1800.0, config_number=3),
    ]
    return RunState(amendments=amendments, attempts=attempts, last_event_unix_s=2000.0)


def test_a_value_is_that_of_its_time(state: RunState) -> None:
    assert [value_of("cluster.nodes", number, state, CONFIG) for number in range(4)] == [2, 1, 1, 4]
    assert value_of("seed", 0, state, CONFIG) == CONFIG.seed


def test_processes_and_nodes_are_averaged_over_time(state: RunState) -> None:
    assert mean_processes(state, CONFIG) == pytest.approx(8 * (600 * 2 + 200 * 1 + 200 * 4) / 1000)
    assert mean_paid_nodes(state, CONFIG) == pytest.approx((600 * 3 + 200 * 2 + 200 * 5) / 1000)


def test_a_run_without_amendments_or_attempts_has_its_own_size(state: RunState) -> None:
    assert mean_processes(RunState(), CONFIG) == CONFIG.world_size
    assert mean_processes(replace(state, amendments=[]), CONFIG) == CONFIG.world_size


def test_only_a_change_of_the_number_of_processes_limits_the_steps_that_count(state: RunState) -> None:
    assert size_since_step(state) == 300
    assert size_since_step(replace(state, amendments=state.amendments[1:2])) == 0
