"""A sweep's state, computed from its journal.

The sweep's journal has each trial's settings, its objective at every rung, how it ended and what it cost. So comparing
trials needs no other files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hlatctl.run import labels, stopping
from hlatctl.run.files import DAMAGED
from hlatctl.run.journal import Event
from hlatctl.run.labels import LabelState
from hlatctl.run.state import ForecastState
from hlatctl.units import number

#: Statuses of trials that have ended.
ENDED = ("finished", "pruned", "diverged", "failed")


@dataclass
class TrialState:
    """One trial: a run of one arm with one seed.

    Args:
        number: number in order of creation, from 0.
        arm: number of the arm, from 0; trials of one arm differ only in ``seed``.
        point: the arm's values, by axis.
        overrides: the arguments with which ``hlatctl train`` creates the same run.
        seed: seed of the trial if the sweep has several; otherwise None.
        status: ``asked``, ``running``, ``paused``, ``stopping`` (it was pruned or diverged, and saves its last
            checkpoint), ``finished``, ``pruned``, ``diverged`` or ``failed``.
        value: objective when the trial has finished; None if it has none.
        rungs: objective by tokens; NaN if it was not a number.
        stops_as: ``pruned`` or ``diverged``, once decided.
        why: reason of an early end or failure.
        process_hours: training time over all processes.
        saved_process_hours: training time that the early end saved.
        lost_drivers: how often its driver died before the trial ended.
    """

    number: int
    run_id: str
    arm: int
    point: dict[str, str]
    overrides: list[str]
    seed: int | None = None
    status: str = "asked"
    value: float | None = None
    rungs: dict[int, float] = field(default_factory=dict)
    tokens: int = 0
    stops_as: str = ""
    why: str = ""
    process_hours: float = 0.0
    saved_process_hours: float = 0.0
    lost_drivers: int = 0
    started_unix_s: float | None = None
    ended_unix_s: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the trial has ended."""
        return self.status in ENDED


@dataclass
class SweepState:
    """The state of a sweep.

    Args:
        status: ``created``, ``running``, ``finished``, ``failed`` or ``stopped``.
        folder: base of relative paths in overrides.
        overrides: overrides of every trial.
        axes: ``[{"key", "values", "low", "high", "log", "integer"}]``; ``low`` is None if ``values`` are listed.
        objective: name as typed.
        direction: ``min`` or ``max``.
        settings: all values of ``sweep.*``.
        arms, trials_planned: planned numbers.
        accelerators: whether each process has an accelerator.
        target: arm of a ladder's target; None in a sweep, whose arms are compared.
        forecast: what a ladder's rungs say of its target; None before they have ended.
        trials: trials by number.
        labels: name, tags and notes.
        driver: token of the newest driver's lease.
        asked_driver: token of the driver that the newest stop request names; empty: no request.
        stop_by: who made the newest stop request.
    """

    sweep_id: str = ""
    status: str = "created"
    simulated: bool = False
    created_unix_s: float = 0.0
    last_event_unix_s: float = 0.0
    folder: str = ""
    overrides: list[str] = field(default_factory=list)
    axes: list[dict[str, Any]] = field(default_factory=list)
    objective: str = ""
    direction: str = "min"
    settings: dict[str, Any] = field(default_factory=dict)
    arms: int = 0
    trials_planned: int = 0
    accelerators: bool = False
    target: int | None = None
    forecast: ForecastState | None = None
    trials: dict[int, TrialState] = field(default_factory=dict)
    labels: LabelState = field(default_factory=LabelState)
    stop_requested: bool = False
    driver: str = ""
    asked_driver: str = ""
    stop_by: str = ""
    message: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def noun(self) -> str:
        """What it is called: sweep or ladder."""
        return "sweep" if self.target is None else "ladder"

    def count(self, *statuses: str) -> int:
        """Return the number of trials with these statuses."""
        return sum(trial.status in statuses for trial in self.trials.values())


def fold(events: Iterable[Event]) -> SweepState:
    """Return the state that a sweep's events describe, in order of time. Unknown kinds are ignored."""
    state = SweepState()
    for event in events:
        apply(state, event)
    return state


def apply(state: SweepState, event: Event) -> None:
    """Apply one more event to a state. A damaged event adds a warning instead."""
    state.last_event_unix_s = max(state.last_event_unix_s, event["time_unix_s"])
    handler = _HANDLERS.get(event["kind"])
    if not handler:
        return
    try:
        handler(state, event)
    except DAMAGED:
        state.warnings.append(f"event {event['seq']} ({event['kind']}): damaged, ignored")


def _sweep_created(state: SweepState, event: Event) -> None:
    state.sweep_id, state.simulated = event["sweep_id"], bool(event["simulated"])
    state.created_unix_s = event["time_unix_s"]
    state.folder, state.overrides = event["folder"], list(event["overrides"])
    state.objective, state.direction = event["objective"], event["direction"]
    state.accelerators = bool(event["accelerators"])
    _space(state, event)


def _space(state: SweepState, event: Event) -> None:
    state.axes, state.settings = list(event["axes"]), dict(event["settings"])
    state.arms, state.trials_planned = int(event["arms"]), int(event["trials"])
    state.target = None if event.get("target") is None else int(event["target"])


def _forecast_made(state: SweepState, event: Event) -> None:
    state.forecast = ForecastState.of(event)


def _head_started(state: SweepState, event: Event) -> None:
    state.status, state.message = "running", ""
    stopping.fold_start(state, event)


def _trial_asked(state: SweepState, event: Event) -> None:
    state.trials[int(event["trial"])] = TrialState(
        number=int(event["trial"]),
        run_id=event["run_id"],
        arm=int(event["arm"]),
        point=dict(event["point"]),
        overrides=list(event["overrides"]),
        seed=event["seed"],
    )


def _trial_started(state: SweepState, event: Event) -> None:
    trial = state.trials[int(event["trial"])]
    trial.status = "running" if trial.status in ("asked", "paused") else trial.status
    trial.started_unix_s = trial.started_unix_s or event["time_unix_s"]


def _trial_paused(state: SweepState, event: Event) -> None:
    state.trials[int(event["trial"])].status = "paused"


def _trial_head_lost(state: SweepState, event: Event) -> None:
    state.trials[int(event["trial"])].lost_drivers += 1


def _trial_rung(state: SweepState, event: Event) -> None:
    trial = state.trials[int(event["trial"])]
    trial.rungs[int(event["tokens"])] = number(event, "value")
    trial.tokens = max(trial.tokens, int(event["tokens"]))


def _trial_stopping(state: SweepState, event: Event) -> None:
    trial = state.trials[int(event["trial"])]
    trial.status, trial.stops_as, trial.why = "stopping", event["outcome"], event["why"]


def _trial_ended(state: SweepState, event: Event) -> None:
    trial = state.trials[int(event["trial"])]
    trial.status, trial.why = event["outcome"], event["why"]
    trial.value, trial.tokens = event["value"], int(event["tokens"])
    trial.process_hours = number(event, "process_hours")
    trial.saved_process_hours = number(event, "saved_process_hours")
    trial.ended_unix_s = event["time_unix_s"]


def _labelled(state: SweepState, event: Event) -> None:
    labels.apply(state.labels, event)


def _sweep_finished(state: SweepState, event: Event) -> None:
    state.status, state.message = event["outcome"], event["message"]


_HANDLERS = {
    "sweep_created": _sweep_created,
    "sweep_extended": _space,
    "head_started": _head_started,
    "forecast_made": _forecast_made,
    "trial_asked": _trial_asked,
    "trial_started": _trial_started,
    "trial_paused": _trial_paused,
    "trial_head_lost": _trial_head_lost,
    "trial_rung": _trial_rung,
    "trial_stopping": _trial_stopping,
    "trial_ended": _trial_ended,
    "stop_requested": stopping.fold_request,
    "labelled": _labelled,
    "sweep_finished": _sweep_finished,
}
