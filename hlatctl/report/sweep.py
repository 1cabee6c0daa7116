"""A sweep's trials and arms as numbers and rows; pure. What they look like is for the command line and the report."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from hlatctl.run.simulated import noted
from hlatctl.run.sweep import SweepState, TrialState
from hlatctl.units import count


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting of all axes over its trials.

    Args:
        number: of the arm.
        point: the setting, by axis.
        trials: its trials, in order of their seeds.
        values: the objective of those that are finished.
        mean: over these; None if there is none.
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
        """The setting as it is typed."""
        return " ".join(f"{key}={value}" for key, value in self.point.items()) or "-"


def arms(state: SweepState) -> list[Arm]:
    """The arms, best first; those without a value last, in the order they were asked for."""
    numbers = sorted({trial.arm for trial in state.trials.values()})
    found = [_arm(number, [t for _, t in sorted(state.trials.items()) if t.arm == number]) for number in numbers]
    sign = -1.0 if state.direction == "max" else 1.0
    return sorted(found, key=lambda arm: (math.inf if arm.mean is None else sign * arm.mean, arm.number))


def best(state: SweepState) -> Arm | None:
    """The winning arm, if there is one with a value."""
    first = next(iter(arms(state)), None)
    return first if first is not None and first.mean is not None else None


def distance(arm: Arm, winner: Arm) -> tuple[float, float | None] | None:
    """How far an arm's objective is off the winner's: the mean over seeds, and its standard error with two or more.

    Trials with one seed begin alike and see the same text, so that they differ by less than their arms' means do. None
    where no seed has finished in both.
    """
    theirs = {trial.seed: trial.value for trial in winner.trials if trial.value is not None}
    gaps = [t.value - theirs[t.seed] for t in arm.trials if t.value is not None and t.seed in theirs]
    return (math.fsum(gaps) / len(gaps), _stderr(gaps)) if gaps else None


def header(state: SweepState) -> list[str]:
    """Of :func:`rows`."""
    return [
        "arm",
        *(str(axis["key"]) for axis in state.axes),
        state.objective,
        "off the best",
        "trials",
        "hours",
        "saved",
        "how",
    ]


def rows(state: SweepState) -> list[list[str]]:
    """An arm a row, best first: what it is, its objective, what it took, and how its trials stand."""
    winner = best(state)
    return [
        [
            str(arm.number),
            *(arm.point[str(axis["key"])] for axis in state.axes),
            value_text(arm),
            _off(arm, winner),
            str(len(arm.trials)),
            f"{sum(t.process_hours for t in arm.trials):.3g}",
            f"{sum(t.saved_process_hours for t in arm.trials):.3g}",
            _how(arm),
        ]
        for arm in arms(state)
    ]


def facts(state: SweepState) -> list[tuple[str, str]]:
    """What a person looks for first, name and text; what is not known is left out."""
    unit = "accelerator-hours" if state.accelerators else "process-hours"
    trials = list(state.trials.values())
    saved = sum(trial.saved_process_hours for trial in trials)
    winner = best(state)
    ended = state.count("finished", "pruned", "diverged", "failed")
    known = [
        ("sweep", noted(state.sweep_id, simulated=state.simulated)),
        ("status", state.status + (f": {state.message}" if state.message else "")),
        ("objective", f"{state.objective}, {'least' if state.direction == 'min' else 'most'} is best"),
        ("trials", f"{ended} of {state.trials_planned} ended"),
        ("took", f"{sum(trial.process_hours for trial in trials):.3g} {unit}"),
        ("saved", f"{saved:.3g} {unit} by ending trials early" if saved else ""),
        ("best", f"{winner.text}: {value_text(winner)}" if winner else ""),
        *(("warning", warning) for warning in state.warnings),
    ]
    return [(name, text) for name, text in known if text]


def value_text(arm: Arm) -> str:
    """Mean and standard error of an arm's objective; a dash where there is none."""
    if arm.mean is None:
        return "–"
    return f"{arm.mean:.4f}" + (f" ± {arm.stderr:.4f}" if arm.stderr is not None else "")


def _off(arm: Arm, winner: Arm | None) -> str:
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


def _how(arm: Arm) -> str:
    """How its trials stand; why, where there is one alone."""
    statuses = [trial.status for trial in arm.trials]
    text = ", ".join(
        f"{statuses.count(status)} {status}" if len(statuses) > 1 else status for status in dict.fromkeys(statuses)
    )
    early = next((trial for trial in arm.trials if trial.status != "finished" and trial.ended), None)
    return f"{text} at {count(early.tokens)}" if early and early.tokens else text
