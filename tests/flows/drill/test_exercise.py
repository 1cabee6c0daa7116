"""A drill compares the steps of two runs, and injects the faults that a configuration allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conf.schema import ClusterConfig, Config, ParallelConfig
from flows.drill.exercise import _compare, _Trial
from flows.drill.faults import FAULTS, Seen


def _arena(losses: dict[int, float]) -> Any:
    return SimpleNamespace(
        events=[{"kind": "step", "step": step, "loss": loss, "grad_norm": 1.0} for step, loss in losses.items()]
    )


@pytest.mark.parametrize(
    ("drilled", "equal"),
    [
        ({10: 5.0, 20: 4.0, 21: 3.9, 30: 3.0}, True),  # an attempt that began at step 21
        ({10: 5.0, 20: 4.0, 30: 3.1}, False),
        ({21: 3.9}, False),
    ],
)
def test_steps_that_both_runs_journal_are_compared(drilled: dict[int, float], equal: bool) -> None:
    seen = Seen(detected_as="killed", detected_s=1.0, recovered_s=2.0, lost_steps=10)
    trial = _Trial("kill_process", _arena(drilled), first_step=20, last_step=30, seen=seen)
    _compare(_arena({1: 6.0, 10: 5.0, 20: 4.0, 30: 3.0}), [trial])
    assert trial.losses_equal == equal
    assert bool(trial.failure) != equal


@pytest.mark.parametrize(
    ("processes", "parallel", "possible"),
    [
        (1, {}, False),
        (2, {}, True),
        (2, {"data_parallel": "fsdp"}, False),
        (4, {"data_parallel": "fsdp", "fsdp_size": 2}, False),
        (2, {"pipeline_parallel_size": 2}, False),
        (4, {"pipeline_parallel_size": 2}, True),
        (4, {"data_parallel": "fsdp", "pipeline_parallel_size": 2}, False),
        (4, {"tensor_parallel_size": 2, "data_parallel": "zero1"}, True),
    ],
)
def test_a_process_is_slowed_only_where_it_can_be_found(
    processes: int, parallel: dict[str, Any], possible: bool
) -> None:
    cluster = ClusterConfig(launcher="local", processes_per_node=processes)
    why_not = FAULTS["slow_process"].skip(Config(cluster=cluster, parallel=ParallelConfig(**parallel)))
    assert (why_not == "") == possible
