"""A drill compares the steps of two runs, and injects the faults that a configuration allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.schema import BackendConfig, ClusterConfig, Config, ParallelConfig
from flows.drill.exercise import Trial, compare
from flows.drill.faults import Seen
from flows.drill.pool import why_not

_SEEN = Seen(detected_as="killed", detected_s=1.0, recovered_s=2.0, lost_steps=2)


def _steps(*losses: float, first: int = 1, norm: float = 2.0, attempt: int = 1) -> list[dict[str, Any]]:
    same = {"kind": "step", "grad_norm": norm, "attempt": attempt}
    return [{**same, "step": step, "loss": loss} for step, loss in enumerate(losses, first)]


def _compared(ours: list[dict[str, Any]], undisturbed: list[dict[str, Any]], *, exactly: bool) -> Trial:
    trial = Trial("kill_process", cast(Any, SimpleNamespace(events=ours)), 4, 5, seen=_SEEN)
    compare(undisturbed, [trial], exactly=exactly)
    return trial


_UNDISTURBED = _steps(5.0, 4.0, 3.0, 2.0, 1.0, 0.5)


@pytest.mark.parametrize("exactly", [True, False])
def test_the_steps_since_the_restored_checkpoint_must_be_repeated(exactly: bool) -> None:
    trial = _compared(_steps(9.0, 9.0, 3.0, 2.0, 1.0), _UNDISTURBED, exactly=exactly)
    assert (trial.failure, trial.losses_equal, trial.largest) == ("", True, 0.0)


@pytest.mark.parametrize(
    ("ours", "is_rounding"),
    [
        (_steps(3.0, 2.0001, 1.0, first=3), True),
        (_steps(3.0, 2.01, 1.0, first=3), False),
        (_steps(3.0, 2.0, 1.0, first=3, norm=2.001), True),
        (_steps(3.0, 2.0, 1.0, first=3, norm=2.1), False),
        (_steps(3.0, float("nan"), 1.0, first=3), False),
        ([], False),
    ],
)
def test_a_cpu_must_repeat_every_bit_and_other_devices_all_but_rounding(
    ours: list[dict[str, Any]], is_rounding: bool
) -> None:
    assert _compared(ours, _UNDISTURBED, exactly=True).failure
    assert (_compared(ours, _UNDISTURBED, exactly=False).failure == "") == is_rounding


def test_steps_that_a_check_for_corruption_rejected_need_not_be_equal() -> None:
    wrong = _steps(1.5, first=5)
    suspected = {"kind": "corruption_suspected", "attempt": 1}
    again = _steps(3.0, 2.0, 1.0, first=3, attempt=2)
    assert not _compared([*wrong, suspected, *again], _UNDISTURBED, exactly=True).failure
    assert _compared([*wrong, *again], _UNDISTURBED, exactly=True).failure


def test_only_steps_that_both_runs_logged_are_compared() -> None:
    """An engine may log every tenth step, and the first one of an attempt."""
    trial = _compared(_steps(3.0, 2.0, 1.0, first=3), _steps(2.0, first=4), exactly=True)
    assert (trial.failure, trial.losses_equal) == ("", True)


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
    config = Config(cluster=cluster, parallel=ParallelConfig(**parallel))
    assert (why_not("slow_process", config) == "") == possible


@pytest.mark.parametrize(
    ("processes", "experts", "is_compared"), [(1, 1, False), (2, 1, True), (2, 2, False), (4, 2, True)]
)
def test_wrong_numbers_are_looked_for_only_with_a_second_replica(
    processes: int, experts: int, is_compared: bool
) -> None:
    cluster = ClusterConfig(processes_per_node=processes)
    parallel = ParallelConfig(data_parallel="fsdp", expert_parallel_size=experts)
    config = Config(backend=BackendConfig(name="torchtitan"), cluster=cluster, parallel=parallel)
    assert why_not("flip_memory", config) == (
        "" if is_compared else "with one replica there is nothing to compare with"
    )
