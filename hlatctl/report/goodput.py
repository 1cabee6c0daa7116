"""The ledger of a run's time: what of it trained the model, what the rest went to, what it cost. Pure.

How the seconds are found is in ``timeline``; how they look is for ``page`` and ``hlatctl goodput``, which share the
text below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import Config
from hlatctl.plan import checkpoint_interval
from hlatctl.report import timeline
from hlatctl.report.numbers import column, mean, median
from hlatctl.report.timeline import RESTART, Account, account
from hlatctl.run.fold import fold
from hlatctl.run.journal import Event, number
from hlatctl.units import duration

#: Training was up: its steps follow one another, whether they counted in the end or not.
_UP = (timeline.PRODUCTIVE, timeline.DATA_WAIT, timeline.CHECKPOINT_STALL, timeline.BETWEEN_STEPS, timeline.LOST)
_LABELS = {
    timeline.PRODUCTIVE: "productive steps",
    timeline.DATA_WAIT: "data wait",
    timeline.CHECKPOINT_STALL: "checkpoint stall",
    timeline.BETWEEN_STEPS: "between steps",
    timeline.LOST: "lost steps (redone)",
    timeline.START: "start of training",
    "warm_cache": "cache warm-up",
    timeline.END: "end of training",
    timeline.EVALUATION_WAIT: "evaluation wait",
    timeline.HEAD: "head, between stages",
    timeline.IDLE: "idle",
}
#: Rows that come last; restarts and stages stand before them as they appear.
_LAST = (timeline.END, timeline.EVALUATION_WAIT, timeline.HEAD, timeline.IDLE)


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The interval between checkpoints that is in use, and the one that would lose least.

    Args:
        save_s: mean time that training stood still for one of the ``saves``.
        failures: attempts that ended without a last checkpoint and that nobody had asked to stop, by cause.
        mean_time_between_failures_s: time in which training was up, per failure; None without a failure.
        least_time_between_failures_s: without a failure, what it exceeds with 95 % confidence.
        step_s: median over the steps that count.
        every_s: ``checkpoint.every_steps`` of them.
        young_s, daly_s: seconds of training between two saves, from the measured figures; None without a failure.
        daly_steps: the same in steps, at least one.
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
    """A run's wall time, split.

    Args:
        wall_s: from the journal's first event to its newest, or to the run's good end.
        seconds: by category; they add up to ``wall_s`` to the microsecond.
        training_s: from the first attempt's start to the newest one's last sign of life.
        up_s: of these, the time in which steps followed one another: productive, lost, data wait, checkpoint stall.
        uptime_fraction: ``up_s`` of ``training_s``; the share that restarts and pauses leave (HLAT, arXiv 2404.10630,
            Table 1: 98.81 % with automatic restarts, 77.83 % without).
        ettr_fraction: effective training time ratio (arXiv 2410.21680): productive time of ``training_s``.
        accelerators: the processes have one each; False on processors.
        process_hours: wall time of all training processes, idle or not.
        cost_usd: of all nodes for the wall time; None without ``cluster.price_usd_per_node_hour``.
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


def measure_goodput(events: Sequence[Event], config: Config) -> Goodput:
    """The ledger of a journal, or of any beginning of it."""
    found = account(events)
    seconds = {category: found.seconds[category] for category in sorted(found.seconds, key=_rank)}
    up_s = math.fsum(seconds.get(category, 0.0) for category in _UP)
    return Goodput(
        wall_s=found.wall_s,
        seconds=seconds,
        training_s=found.training_s,
        up_s=up_s,
        uptime_fraction=_share(up_s, found.training_s),
        ettr_fraction=_share(seconds.get(timeline.PRODUCTIVE, 0.0), found.training_s),
        accelerators=config.backend.device != "cpu",
        process_hours=config.world_size * found.wall_s / 3600,
        cost_usd=_cost_usd(found.wall_s, config),
        checkpointing=_checkpointing(events, config, found, up_s),
    )


def _checkpointing(events: Sequence[Event], config: Config, found: Account, up_s: float) -> Checkpointing:
    written = [event for event in events if event["kind"] == "checkpoint_written"]
    stalls_s = [number(event, timeline.stall_field(event)) for event in written]
    save_s = mean([stall_s for stall_s in stalls_s if stall_s >= 0])  # nor is a negative one a duration
    step_s = median(column(list(fold(events).steps.values()), "step_s"))
    failures = sum(found.failures.values())
    between_s = up_s / failures if failures and up_s > 0 else None
    quiet_s = checkpoint_interval.least_time_between_failures_s(up_s) if not failures and up_s > 0 else None
    young_s = daly_s = None
    if save_s and between_s:
        young_s = checkpoint_interval.young_s(save_s, between_s)
        daly_s = checkpoint_interval.daly_s(save_s, between_s)
    every = config.checkpoint.every_steps
    return Checkpointing(
        saves=len(written),
        save_s=save_s,
        failures=found.failures,
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
    """A category as people read it."""
    if category.startswith(RESTART):
        return f"restart: {category.removeprefix(RESTART)}"
    return _LABELS.get(category, category.replace("_", " "))


def time_table(found: Goodput) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a category a row, with its time, its share, and its cost where there is a price."""
    priced = found.cost_usd is not None
    header = ["where it went", "time", "share", *(["USD"] if priced else [])]
    rows = []
    for category, seconds in [*found.seconds.items(), ("wall time", found.wall_s)]:
        share = seconds / found.wall_s if found.wall_s else 0.0
        cost = [f"{share * found.cost_usd:,.2f}"] if found.cost_usd is not None else []
        rows.append([label(category), duration(seconds), f"{100 * share:.1f} %", *cost])
    return header, rows


def facts(found: Goodput) -> list[tuple[str, str]]:
    """What follows from the split, name and text; what is not known is left out."""
    hours = "accelerator-hours" if found.accelerators else "process-hours"
    known = [
        ("goodput (ETTR)", _percent(found.ettr_fraction, "productive steps", found)),
        ("uptime", _percent(found.uptime_fraction, "training was up", found)),
        (hours, f"{found.process_hours:,.2f}"),
        ("cost", "" if found.cost_usd is None else f"{found.cost_usd:,.2f} USD"),
        *_interval_facts(found.checkpointing, found.up_s),
    ]
    return [(name, text) for name, text in known if text]


def _interval_facts(found: Checkpointing, up_s: float) -> list[tuple[str, str]]:
    every = f"every {found.every_steps:,} steps" + (f", {duration(found.every_s)}" if found.every_s else "")
    saves = f"{found.saves:,} checkpoints" if found.saves != 1 else "1 checkpoint"
    causes = ", ".join(f"{count} {cause}" for cause, count in found.failures.items())
    failed = f"{causes}, in {duration(up_s)} of training"
    if found.mean_time_between_failures_s is not None:
        failed += f": one in {duration(found.mean_time_between_failures_s)}"
    none = f"none in {duration(up_s)} of training"
    if found.least_time_between_failures_s is not None:
        none += f": with 95 % confidence less than one in {duration(found.least_time_between_failures_s)}"
    steps = f", {found.daly_steps:,} step{'s' * (found.daly_steps > 1)}" if found.daly_steps else ""
    return [
        ("a save stalls training", "" if found.save_s is None else f"{duration(found.save_s)}, mean of {saves}"),
        ("failures", failed if found.failures else none),
        ("checkpoints now", every),
        ("checkpoints by Young", "" if found.young_s is None else f"every {duration(found.young_s)}"),
        ("checkpoints by Daly", "" if found.daly_s is None else f"every {duration(found.daly_s)}{steps}"),
    ]


def _rank(category: str) -> int:
    if category in _UP:
        return _UP.index(category) - len(_UP)
    return 1 + _LAST.index(category) if category in _LAST else 0


def _percent(fraction: float | None, what: str, found: Goodput) -> str:
    if fraction is None:
        return ""
    return f"{100 * fraction:.1f} % ({what}, of {duration(found.training_s)} since the first attempt's start)"


def _share(part_s: float, whole_s: float) -> float | None:
    return part_s / whole_s if whole_s > 0 else None


def _cost_usd(wall_s: float, config: Config) -> float | None:
    price = config.cluster.price_usd_per_node_hour
    return None if price is None else config.cluster.nodes * price * wall_s / 3600
