"""A sweep's arms: means over seeds, order, saved hours."""

from __future__ import annotations

import pytest

from hlatctl.report.sweep import arms, best, distance, facts, header, rows
from hlatctl.run.sweep import SweepState, TrialState


def trial(number: int, arm: int, status: str, value: float | None, saved: float = 0.0) -> TrialState:
    return TrialState(
        number,
        f"s-t{number:04d}",
        arm,
        {"seed": str(arm)},
        [],
        status=status,
        value=value,
        tokens=1_000_000,
        process_hours=2.0,
        saved_process_hours=saved,
    )


def state(direction: str) -> SweepState:
    trials = [
        trial(0, 0, "finished", 4.0),
        trial(1, 0, "finished", 5.0),
        trial(2, 1, "finished", 3.0),
        trial(3, 1, "failed", None),
        trial(4, 2, "diverged", None, 1.5),
    ]
    return SweepState(
        sweep_id="s",
        status="finished",
        axes=[{"key": "seed"}],
        objective="loss",
        direction=direction,
        trials_planned=6,
        trials={each.number: each for each in trials},
    )


def test_arms_have_means_and_standard_errors_and_the_best_comes_first() -> None:
    least, most = arms(state("min")), arms(state("max"))
    assert [arm.number for arm in least] == [1, 0, 2]
    assert [arm.number for arm in most] == [0, 1, 2]
    assert most[0].mean == 4.5
    assert most[0].stderr == pytest.approx(0.5)
    assert (least[0].mean, least[0].stderr) == (3.0, None), "one value has no standard error"
    assert best(SweepState()) is None


def test_rows_and_facts_have_statuses_and_hours() -> None:
    sweep = state("min")
    assert header(sweep) == ["arm", "seed", "loss", "difference from best", "trials", "hours", "saved", "status"]
    assert rows(sweep) == [
        ["1", "1", "3.0000", "–", "2", "4", "0", "1 finished, 1 failed at 1M"],
        ["0", "0", "4.5000 ± 0.5000", "+1.5000 ± 0.5000", "2", "4", "0", "2 finished"],
        ["2", "2", "–", "–", "1", "2", "1.5", "diverged at 1M"],
    ]
    assert ("saved", "1.5 process-hours by ending trials early") in facts(sweep)
    assert ("trials", "5 of 6 ended") in facts(sweep)
    assert ("best", "seed=1: 3.0000") in facts(sweep)


def test_arms_are_compared_seed_by_seed() -> None:
    """Seeds differ by 1 and arms by 0.1: differences between seeds must not hide those between arms."""
    sweep = state("min")
    sweep.trials = {}
    values = [(0, 1, 3.0), (0, 2, 4.0), (0, 3, 5.0), (1, 1, 3.1), (1, 2, 4.12), (1, 4, 9.0)]
    for number, (arm, seed, value) in enumerate(values):
        sweep.trials[number] = trial(number, arm, "finished", value)
        sweep.trials[number].seed = seed
    first, second = arms(sweep)
    assert distance(second, first) == pytest.approx((0.11, 0.01))
    assert rows(sweep)[1][3] == "+0.1100 ± 0.0100"
    second.trials[:] = second.trials[2:]
    assert distance(second, first) is None, "no seed in common"
