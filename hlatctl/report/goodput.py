"""Goodput of a run: its wall time by category, its cost, and the best checkpoint interval. Pure.

``timeline`` assigns the seconds to categories. The report page and ``hlatctl goodput`` show the texts below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from conf.schema import Config
from hlatctl.plan import checkpoint_interval
from hlatctl.report import measured, timeline
from hlatctl.report.in_force import mean_paid_nodes, mean_processes
from hlatctl.report.numbers import column, mean, median
from hlatctl.report.timeline import RESTART, Account, account
from hlatctl.run.journal import Event
from hlatctl.run.state import RunState
from hlatctl.units import duration

#: Training was up: steps followed one another, including steps that were later redone.
_UP = (measured.PRODUCTIVE, measured.DATA_WAIT, measured.CHECKPOINT_STALL, timeline.BETWEEN_STEPS, measured.LOST)
_LABELS = {
    measured.PRODUCTIVE: "productive steps",
    measured.DATA_WAIT: "data wait",
    measured.CHECKPOINT_STALL: "checkpoint stall",
    timeline.BETWEEN_STEPS: "between steps",
    measured.LOST: "lost steps (redone)",
    timeline.START: "start of training",
    "warm_cache": "cache warm-up",
    timeline.END: "end of training",
    timeline.EVALUATION_WAIT: "evaluation wait",
    timeline.QUEUED: "waiting in the queue",
    timeline.HEAD: "driver, between stages",
    timeline.IDLE: "idle",
}
#: The last rows; restarts and stages precede them in order of time.
_LAST = (timeline.END, timeline.EVALUATION_WAIT, timeline.QUEUED, timeline.HEAD, timeline.IDLE)


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The interval between checkpoints, and the intervals that would lose the least time.

    Args:
        saves: number of checkpoints written.
        save_s: mean time that training paused for a checkpoint.
        failures: attempts that ended without a last checkpoint and without a request to stop, by cause.
        mean_time_between_failures_s: uptime per failure; None without a failure.
        least_time_between_failures_s: without a failure, its lower bound with 95 % confidence.
        step_s: median over the steps that count.
        every_steps: ``checkpoint.every_steps``; ``every_s`` is the time of these steps.
        young_s, daly_s: best interval in seconds of training, from the measured values; None without a failure.
        daly_steps: ``daly_s`` in steps, at least one.
    """

    saves: int
    save_s: float | None
    failures: dict[str, int]
    mean_time_between_failures_s: float | None
    least_time_between_failures_s: float | None
    step_s: float | None
    every_steps: int
    every_s: float | None
    young_s: float | None
    daly_s: float | None
    daly_steps: int | None


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """A run's wall time by category, and what follows from it.

    Args:
        wall_s: from the journal's first event to its newest, or to the end of a finished run.
        seconds: by category; they add up to ``wall_s`` to the microsecond.
        training_s: from the first attempt's start to the newest attempt's last event.
        up_s: the part of ``training_s`` in which steps followed one another (``_UP``).
        uptime_fraction: ``up_s / training_s`` (HLAT, arXiv 2404.10630, Table 1: 98.81 % with automatic restarts,
            77.83 % without).
        ettr_fraction: effective training time ratio (arXiv 2410.21680): productive time / ``training_s``.
        accelerators: each process has an accelerator; False on CPUs.
        process_hours: wall time of all training processes, idle or not, without the time in a queue.
        cost_usd: of all nodes and spare ones for the wall time without the time in a queue; None without
            ``cluster.price_usd_per_node_hour``.
    """

    wall_s: float
    seconds: dict[str, float]
    training_s: float
    up_s: float
    uptime_fraction: float | None
    ettr_fraction: float | None
    accelerators: bool
    process_hours: float
    cost_usd: float | None
    checkpointing: Checkpointing


def measure_goodput(events: Iterable[Event], config: Config, state: RunState) -> Goodput:
    """Return the goodput of a journal, or of any prefix of it.

    Args:
        events: of the journal, in order of time; steps among them are ignored.
        config: of the run.
        state: that the events describe.

    Raises:
        DependencyError: numpy is not installed.
    """
    time = account(events, state.steps)
    seconds = {category: time.seconds[category] for category in sorted(time.seconds, key=_rank)}
    held_s = time.wall_s - seconds.get(timeline.QUEUED, 0.0)
    up_s = math.fsum(seconds.get(category, 0.0) for category in _UP)
    return Goodput(
        wall_s=time.wall_s,
        seconds=seconds,
        training_s=time.training_s,
        up_s=up_s,
        uptime_fraction=_share(up_s, time.training_s),
        ettr_fraction=_share(seconds.get(measured.PRODUCTIVE, 0.0), time.training_s),
        accelerators=config.backend.device != "cpu",
        process_hours=mean_processes(state, config) * held_s / 3600,
        cost_usd=_cost_usd(held_s, config, state),
        checkpointing=_checkpointing(state, config, time, up_s),
    )


def _checkpointing(state: RunState, config: Config, time: Account, up_s: float) -> Checkpointing:
    save_s = mean([stall_s for stall_s in time.stalls_s if stall_s >= 0])  # damaged: NaN or negative
    step_s = median(column(state, "step_s"))
    failures = sum(time.failures.values())
    between_s = up_s / failures if failures and up_s > 0 else None
    quiet_s = checkpoint_interval.least_time_between_failures_s(up_s) if not failures and up_s > 0 else None
    young_s = daly_s = None
    if save_s and between_s:
        young_s = checkpoint_interval.young_s(save_s, between_s)
        daly_s = checkpoint_interval.daly_s(save_s, between_s)
    every = config.checkpoint.every_steps
    return Checkpointing(
        saves=len(time.stalls_s),
        save_s=save_s,
        failures=time.failures,
        mean_time_between_failures_s=between_s,
        least_time_between_failures_s=quiet_s,
        step_s=step_s,
        every_steps=every,
        every_s=every * step_s if step_s else None,
        young_s=young_s,
        daly_s=daly_s,
        daly_steps=max(1, round(daly_s / step_s)) if daly_s and step_s else None,
    )


def label(category: str) -> str:
    """Return a category's name for people."""
    if category.startswith(RESTART):
        return f"restart: {category.removeprefix(RESTART)}"
    return _LABELS.get(category, category.replace("_", " "))


def time_table(goodput: Goodput) -> tuple[list[str], list[list[str]]]:
    """Return a header and a row per category with its time, share and cost (if there is a price)."""
    priced = goodput.cost_usd is not None
    held_s = goodput.wall_s - goodput.seconds.get(timeline.QUEUED, 0.0)
    header = ["category", "time", "share", *(["USD"] if priced else [])]
    rows = []
    for category, seconds in [*goodput.seconds.items(), ("wall time", goodput.wall_s)]:
        share = seconds / goodput.wall_s if goodput.wall_s else 0.0
        cost = [] if goodput.cost_usd is None else [f"{_part(category, seconds, held_s) * goodput.cost_usd:,.2f}"]
        rows.append([label(category), duration(seconds), f"{100 * share:.1f} %", *cost])
    return header, rows


def facts(goodput: Goodput) -> list[tuple[str, str]]:
    """Return the known facts that follow from the categories, as name and text."""
    hours = "accelerator-hours" if goodput.accelerators else "process-hours"
    known = [
        ("goodput (ETTR)", _percent(goodput.ettr_fraction, "productive steps", goodput)),
        ("uptime", _percent(goodput.uptime_fraction, "training was up", goodput)),
        (hours, f"{goodput.process_hours:,.2f}"),
        ("cost", "" if goodput.cost_usd is None else f"{goodput.cost_usd:,.2f} USD"),
        *_interval_facts(goodput.checkpointing, goodput.up_s),
    ]
    return [(name, text) for name, text in known if text]


def _interval_facts(saving: Checkpointing, up_s: float) -> list[tuple[str, str]]:
    every = f"every {saving.every_steps:,} steps" + (f", {duration(saving.every_s)}" if saving.every_s else "")
    saves = f"{saving.saves:,} checkpoints" if saving.saves != 1 else "1 checkpoint"
    causes = ", ".join(f"{count} {cause}" for cause, count in saving.failures.items())
    failed = f"{causes}, in {duration(up_s)} of training"
    if saving.mean_time_between_failures_s is not None:
        failed += f": one in {duration(saving.mean_time_between_failures_s)}"
    none = f"none in {duration(up_s)} of training"
    if saving.least_time_between_failures_s is not None:
        none += f": with 95 % confidence less than one in {duration(saving.least_time_between_failures_s)}"
    steps = f", {saving.daly_steps:,} step{'s' * (saving.daly_steps > 1)}" if saving.daly_steps else ""
    return [
        ("checkpoint stall", "" if saving.save_s is None else f"{duration(saving.save_s)}, mean of {saves}"),
        ("failures", failed if saving.failures else none),
        ("checkpoint interval", every),
        ("best interval (Young)", "" if saving.young_s is None else f"every {duration(saving.young_s)}"),
        ("best interval (Daly)", "" if saving.daly_s is None else f"every {duration(saving.daly_s)}{steps}"),
    ]


def _rank(category: str) -> int:
    if category in _UP:
        return _UP.index(category) - len(_UP)
    return 1 + _LAST.index(category) if category in _LAST else 0


def _percent(fraction: float | None, what: str, goodput: Goodput) -> str:
    if fraction is None:
        return ""
    return f"{100 * fraction:.1f} % ({what}, of {duration(goodput.training_s)} since the first attempt's start)"


def _share(part_s: float, whole_s: float) -> float | None:
    return part_s / whole_s if whole_s > 0 else None


def _part(category: str, seconds: float, held_s: float) -> float:
    """Return a category's part of the cost: a queued job costs nothing."""
    if category == timeline.QUEUED or not held_s:
        return 0.0
    return min(1.0, seconds / held_s)


def _cost_usd(held_s: float, config: Config, state: RunState) -> float | None:
    price = config.cluster.price_usd_per_node_hour
    return None if price is None else mean_paid_nodes(state, config) * price * held_s / 3600
