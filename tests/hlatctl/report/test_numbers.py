"""Throughput over nodes, planned and measured, and statistics of gradient spikes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conf.compose import compose
from conf.schema import ClusterConfig, Config
from hlatctl.report.numbers import Scaling, Spikes, node_hours, process_hours, scaling, size_since_step, value_of
from hlatctl.run.fold import fold
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
    return RunState(amendments=amendments, attempts=attempts, last_event_unix_s=2000.0, worked_unix_s=2000.0)


def test_a_value_is_that_of_its_time(state: RunState) -> None:
    assert [value_of("cluster.nodes", number, state, CONFIG) for number in range(4)] == [2, 1, 1, 4]
    assert value_of("seed", 0, state, CONFIG) == CONFIG.seed


def test_hours_count_the_processes_and_nodes_of_their_time(state: RunState) -> None:
    held = replace(state, held_s={0: 600.0, 1: 200.0, 3: 200.0})
    assert process_hours(held, CONFIG) == pytest.approx(8 * (600 * 2 + 200 * 1 + 200 * 4) / 3600)
    assert node_hours(held, CONFIG) == pytest.approx((600 * 3 + 200 * 2 + 200 * 5) / 3600)
    assert node_hours(replace(held, has_nodes=True), CONFIG, now_unix_s=2060.0) == pytest.approx(
        (600 * 3 + 200 * 2 + 260 * 5) / 3600
    )
    assert node_hours(state, CONFIG, now_unix_s=2060.0) == 0.0


def test_only_a_change_of_the_number_of_processes_limits_the_steps_that_count(state: RunState) -> None:
    assert size_since_step(state) == 300
    assert size_since_step(replace(state, amendments=state.amendments[1:2])) == 0


def _state(*rates: float) -> list[dict[str, object]]:
    head = {"v": 1, "time_unix_s": 1.0, "attempt": 1, "kind": "step"}
    return [
        {**head, "seq": step, "step": step, "tokens": step, "loss": 1.0, "tokens_per_s": rate}
        for step, rate in enumerate(rates, 1)
    ]


def test_the_plan_covers_fewer_and_more_nodes_and_loses_efficiency() -> None:
    config = compose(["experiment=hlat_7b"])
    found = scaling(fold(_state(9e5, 1e6, 1.1e6)), config)
    assert found.measured == {64: 1e6}
    assert {2, 64, 128} <= set(found.planned)
    assert found.planned[128] > found.planned[64]
    shares = [found.planned[nodes] / nodes for nodes in sorted(found.planned)]
    assert shares == sorted(shares, reverse=True)
    efficiency = found.efficiency(64)
    assert efficiency is not None
    assert efficiency == pytest.approx(1e6 / 64 / (found.planned[2] / 2))


def test_without_hardware_only_the_measured_size_is_known() -> None:
    found = scaling(fold(_state(10.0)), compose([]))
    assert found == Scaling({}, {1: 10.0})
    assert found.efficiency(1) is None


def test_lengths_are_of_spikes_that_ended_and_compared_with_the_paper() -> None:
    lengths = [1, 1, 1, 4]
    state = RunState(spikes=[*({"step": n, "length_steps": length} for n, length in enumerate(lengths)), {"step": 9}])
    spikes = Spikes.of(state)
    assert (spikes.count, spikes.lengths_steps, spikes.one_step_fraction) == (5, [1, 1, 1, 4], 0.75)
    facts = dict(spikes.facts())
    assert facts["last one step"] == "75 % (HLAT: 86 %)"
    assert (facts["median length"], facts["greatest length"]) == ("1 steps", "4 steps")


def test_without_a_spike_that_ended_nothing_is_said_of_lengths() -> None:
    assert "last one step" not in dict(Spikes(count=1, steps=50, lengths_steps=[]).facts())
