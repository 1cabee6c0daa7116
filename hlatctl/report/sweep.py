"""A sweep's arms and trials as numbers and rows, for the command line and the report; pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from hlatctl.run.labels import noted
from hlatctl.run.sweep import SweepState, TrialState
from hlatctl.units import count


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting of all axes, and its trials.

    Args:
        point: value on each axis.
        trials: trials in order of their seeds.
        values: objectives of the finished trials.
        mean: mean of ``values``; None if there are none.
        stderr: standard error of the mean, from the sample's deviation; None with fewer than two values.
    """

    number: int
    point: dict[str, str]
    trials: list[TrialState]
    values: list[float]
    mean: float | None
    stderr: float | None

    @property
    def text(self) -> str:
        """Return the setting as overrides."""
        return " ".join(f"{key}={value}" for key, value in self.point.items()) or "-"


def arms(state: SweepState) -> list[Arm]:
    """Return the arms, best first. Arms without a value come last, in order of their numbers."""
    numbers = sorted({trial.arm for trial in state.trials.values()})
    unsorted = [_arm(number, [t for _, t in sorted(state.trials.items()) if t.arm == number]) for number in numbers]
    sign = -1.0 if state.direction == "max" else 1.0
    return sorted(unsorted, key=lambda arm: (math.inf if arm.mean is None else sign * arm.mean, arm.number))


def best(state: SweepState) -> Arm | None:
    """Return the best arm; None if no arm has a value."""
    first = next(iter(arms(state)), None)
    return first if first is not None and first.mean is not None else None


def distance(arm: Arm, winner: Arm) -> tuple[float, float | None] | None:
    """Return an arm's mean difference from the winner's objective, and its standard error with two or more seeds.

    The difference is paired by seed: trials with the same seed start equally and see the same text, so they differ less
    than the means of their arms. None if no seed has finished in both.
    """
    theirs = {trial.seed: trial.value for trial in winner.trials if trial.value is not None}
    gaps = [t.value - theirs[t.seed] for t in arm.trials if t.value is not None and t.seed in theirs]
    return (math.fsum(gaps) / len(gaps), _stderr(gaps)) if gaps else None


def header(state: SweepState) -> list[str]:
    """Return the header of :func:`rows`."""
    return [
        "arm",
        *(str(axis["key"]) for axis in state.axes),
        state.objective,
        "difference from best",
        "trials",
        "hours",
        "saved",
        "status",
    ]


def rows(state: SweepState) -> list[list[str]]:
    """Return a row per arm, best first: setting, objective, hours and the status of its trials."""
    winner = best(state)
    return [
        [
            str(arm.number),
            *(arm.point[str(axis["key"])] for axis in state.axes),
            value_text(arm),
            _difference(arm, winner),
            str(len(arm.trials)),
            f"{sum(t.process_hours for t in arm.trials):.3g}",
            f"{sum(t.saved_process_hours for t in arm.trials):.3g}",
            _status(arm),
        ]
        for arm in arms(state)
    ]


def facts(state: SweepState) -> list[tuple[str, str]]:
    """Return the known main facts of a sweep, as name and text."""
    unit = "accelerator-hours" if state.accelerators else "process-hours"
    trials = list(state.trials.values())
    saved = sum(trial.saved_process_hours for trial in trials)
    winner = best(state)
    ended = state.count("finished", "pruned", "diverged", "failed")
    known = [
        ("sweep", noted(state.sweep_id, simulated=state.simulated)),
        ("status", state.status + (f": {state.message}" if state.message else "")),
        ("objective", f"{state.objective}, the {'lowest' if state.direction == 'min' else 'highest'} is best"),
        ("trials", f"{ended} of {state.trials_planned} ended"),
        ("hours", f"{sum(trial.process_hours for trial in trials):.3g} {unit}"),
        ("saved", f"{saved:.3g} {unit} by ending trials early" if saved else ""),
        ("best", f"{winner.text}: {value_text(winner)}" if winner else ""),
        *(("warning", warning) for warning in state.warnings),
    ]
    return [(name, text) for name, text in known if text]


def value_text(arm: Arm) -> str:
    """Return mean and standard error of an arm's objective; a dash without a value."""
    if arm.mean is None:
        return "–"
    return f"{arm.mean:.4f}" + (f" ± {arm.stderr:.4f}" if arm.stderr is not None else "")


def _difference(arm: Arm, winner: Arm | None) -> str:
    gap = distance(arm, winner) if winner is not None and arm.number != winner.number else None
    if gap is None:
        return "–"
    return f"{gap[0]:+.4f}" + (f" ± {gap[1]:.4f}" if gap[1] is not None else "")


def _arm(number: int, trials: list[TrialState]) -> Arm:
    values = [trial.value for trial in trials if trial.value is not None]
    return Arm(
        number=number,
        point=trials[0].point,
        trials=trials,
        values=values,
        mean=math.fsum(values) / len(values) if values else None,
        stderr=_stderr(values),
    )


def _stderr(values: list[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _status(arm: Arm) -> str:
    statuses = [trial.status for trial in arm.trials]
    text = ", ".join(
        f"{statuses.count(status)} {status}" if len(statuses) > 1 else status for status in dict.fromkeys(statuses)
    )
    early = next((trial for trial in arm.trials if trial.status != "finished" and trial.ended), None)
    return f"{text} at {count(early.tokens)}" if early and early.tokens else text
