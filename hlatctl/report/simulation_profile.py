"""A run's measured times, failure rates and failures as a profile for ``simulation=NAME``. Pure.

Times are means, because a simulation has to lose as much time as the run, not as its usual recovery. They hold for the
same model on the same cluster. What the run did not do is left to the defaults.
"""

from __future__ import annotations

import statistics
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.schema import Config
from conf.schema.simulation import OF_CLUSTER, FailureKind
from conf.sizes import checkpoint_bytes
from hlatctl.run.journal import Event
from hlatctl.run.state import AttemptState, RunState
from hlatctl.units import duration, number

#: The kind of failure that ends an attempt with a cause; others are ended by people, or by the run itself.
KIND_OF_CAUSE: dict[str, FailureKind] = {
    "device_failed": "hardware",
    "node_failed": "node",
    "killed": "process",
    "crashed": "process",
    "lost": "process",
    "out_of_memory": "process",
    "hang": "hang",
    "collective_timeout": "collective_timeout",
    "network": "collective_timeout",
    "preempted": "upgrade",
    "reclaimed": "upgrade",
    "disk_full": "disk_full",
    "rollback": "nan",
    "corruption": "flip_memory",
}
#: Stages and the settings of their times.
_STAGES = {"data": "prepare_data_s", "compile": "compile_s", "warm_cache": "warm_cache_s"}
_RATES_PER = 1000


@dataclass
class _Seen:
    """What the events tell beyond the state."""

    stages_s: dict[str, list[float]] = field(default_factory=dict)
    measured_unix_s: list[float] = field(default_factory=list)
    hung_unix_s: dict[int, float] = field(default_factory=dict)
    saves: list[Event] = field(default_factory=list)
    evaluations_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> _Seen:
        seen = cls()
        for event in events:
            kind = event["kind"]
            if kind == "stage_finished":
                seen.stages_s.setdefault(str(event["stage"]), []).append(number(event, "wall_s"))
                if event["stage"] == "preflight":
                    seen.measured_unix_s.append(event["time_unix_s"])
            elif kind == "hang":
                seen.hung_unix_s[event["attempt"]] = event["time_unix_s"]
            elif kind == "checkpoint_written":
                seen.saves.append(event)
            elif kind == "eval_finished":
                seen.evaluations_s.append(number(event, "wall_s"))
        return seen


def profile(events: Iterable[Event], config: Config, state: RunState) -> dict[str, Any]:
    """Return the settings of ``simulation.*`` that a run's journal tells, nested as in a profile.

    Args:
        events: events in order of time; steps among them are ignored.
    """
    seen = _Seen.of(events)
    steps = _steps(state, seen)
    found = {
        **steps,
        **_recoveries(state, seen, steps.get("step_s") or 0.0),
        **_stages(seen),
        **_saves(seen.saves, config),
    }
    hours = _training_hours(state)
    values = {name: float(f"{value:.4g}") for name, value in found.items() if value is not None and value >= 0}
    return {**values, "failures": _rates(state, config, hours)} if hours else values


def text(values: dict[str, Any], state: RunState, run_id: str) -> str:
    """Return a profile as YAML, with where it is from, and the run's failures as comments."""
    counts = Counter(KIND_OF_CAUSE[attempt.cause] for attempt in state.attempts if attempt.cause in KIND_OF_CAUSE)
    failed = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no failures"
    recoveries = sum(bool(attempt.recovery) for attempt in state.attempts)
    hours = duration(3600 * _training_hours(state))
    lines = [
        f"# Measured in run {run_id}: {failed} in {hours} of training, {recoveries} recoveries. Times are means.",
        *(f"{name}: {value:.12g}" for name, value in values.items() if not isinstance(value, dict)),
    ]
    if rates := values.get("failures"):
        lines += ["# Per 1,000 node-hours, or 1,000 hours of the cluster; few failures make rough rates.", "failures:"]
        lines += [f"  {kind}: {rate:.12g}" for kind, rate in rates.items()]
    if past := history(state):
        lines += ["# To simulate exactly these failures instead:", "# history:"]
        lines += [
            f"# - {{after_s: {each['after_s']:.1f}, kind: {each['kind']}, node: {each['node']}}}" for each in past
        ]
    return "\n".join(lines) + "\n"


def history(state: RunState) -> list[dict[str, Any]]:
    """Return the failures of a run as ``simulation.history``: when the trainer fell silent, what followed, and where.

    A node is its place among the attempt's hosts; 0 if none is blamed.
    """
    if not state.attempts:
        return []
    began_unix_s = state.attempts[0].started_unix_s
    ends = [attempt for attempt in state.attempts if attempt.cause in KIND_OF_CAUSE and attempt.last_step]
    return [
        {
            "after_s": max(0.0, (each.ended_unix_s or 0.0) - (each.detect_s or 0.0) - began_unix_s),
            "kind": KIND_OF_CAUSE[each.cause],
            "node": next((each.hosts.index(host) for host in each.blamed_hosts if host in each.hosts), 0),
        }
        for each in ends
    ]


def _steps(state: RunState, seen: _Seen) -> dict[str, float | None]:
    """Return the mean time of a step, in it and between two, without first steps and pauses for checkpoints."""
    columns = state.steps.rows.columns("attempt", "step", "steps", "step_s", "data_wait_s", "time_unix_s")
    stalls = {(each["attempt"], each["step"]): _stall_s(each) for each in seen.saves}
    own_s = wait_s = whole_s = 0.0
    steps = 0
    before: tuple[float, float, float] | None = None
    for attempt, step, made, step_s, data_wait_s, at_unix_s in zip(*columns, strict=True):
        wait_s += made * max(0.0, data_wait_s)
        if before and before[0] == attempt and step == before[1] + made and step_s > 0:
            own_s, steps = own_s + made * step_s, steps + int(made)
            whole_s += at_unix_s - before[2] - stalls.get((int(attempt), int(before[1])), 0.0)
        before = (attempt, step, at_unix_s)
    if not steps:
        return {}
    between_s = max(0.0, whole_s - own_s)
    return {"step_s": own_s / steps, "data_wait_s": wait_s / steps, "between_steps_s": between_s / steps}


def _recoveries(state: RunState, seen: _Seen, step_s: float) -> dict[str, float | None]:
    """Return the parts of recoveries; a part that a wait belongs to counts only in recoveries without it."""
    pairs = [
        (before, after) for before, after in zip(state.attempts, state.attempts[1:], strict=False) if after.recovery
    ]
    direct = [pair for pair in pairs if not pair[1].recovery.get("retry_s")]
    warm = [pair for pair in direct if pair[1].recovery.get("warm")]
    cold = [pair for pair in direct if not pair[1].recovery.get("warm")]
    upgraded = [pair for pair in direct if KIND_OF_CAUSE.get(pair[0].cause) == "upgrade"]
    start_s = _mean([pair for pair in cold if pair not in upgraded] or cold or warm, _start_s)
    without_nodes_s = None if start_s is None else _mean(upgraded, lambda r: max(0.0, _start_s(r) - start_s))
    # A process that dies does so half a step after the last event, on average.
    died_s, cut_s = (
        [max(0.0, (one.detect_s or 0.0) - step_s / 2) for one, _ in direct if KIND_OF_CAUSE.get(one.cause) in kinds]
        for kinds in (("hardware", "process"), ("node",))
    )
    left_s = [one.detect_s or 0.0 for one, _ in direct if KIND_OF_CAUSE.get(one.cause) in ("upgrade", "nan")]
    hung_s = [
        (one.ended_unix_s or 0.0) - (one.decide_s or 0.0) - seen.hung_unix_s[one.number]
        for one, _ in direct
        if one.number in seen.hung_unix_s
    ]
    placed = [pair for pair in direct if not _waited(*pair, state, seen)]
    return {
        "detect_s": statistics.mean(died_s) if died_s else None,
        "node_detect_s": statistics.mean(cut_s) if cut_s else None,
        "leave_s": statistics.mean(left_s) if left_s else None,
        "end_hung_s": statistics.mean(hung_s) if hung_s else None,
        "decide_s": _mean(direct, lambda r: r["decide_s"]),
        "place_s": _mean(placed, lambda r: r["place_s"]),
        "start_s": start_s,
        "warm_start_s": _mean(warm, _start_s) if cold else None,
        "groups_s": _mean(direct, lambda r: r["groups_s"]),
        "load_s": _mean(direct, lambda r: r["load_s"]),
        "first_step_s": _mean(direct, lambda r: r["first_step_s"]) or None,
        "upgrade_s": without_nodes_s,
    }


def _start_s(recovery: dict[str, float]) -> float:
    return recovery["start_s"] + recovery["groups_s"]


def _waited(before: AttemptState, after: AttemptState, state: RunState, seen: _Seen) -> bool:
    """Return whether nodes were measured between two attempts, or the policy waited, as it does without progress."""
    measured = any((before.ended_unix_s or 0.0) <= at <= after.started_unix_s for at in seen.measured_unix_s)
    earlier = max((each.newest_checkpoint for each in state.attempts if each.number < before.number), default=0)
    return measured or before.newest_checkpoint <= earlier


def _mean(pairs: Sequence[tuple[Any, AttemptState]], part: Callable[[dict[str, float]], float]) -> float | None:
    found = [part({name: value or 0.0 for name, value in pair[1].recovery.items()}) for pair in pairs]
    return statistics.mean(found) if found else None


def _stages(seen: _Seen) -> dict[str, float | None]:
    measured = seen.stages_s.get("preflight", [])
    found: dict[str, float | None] = {
        name: seen.stages_s[stage][-1] for stage, name in _STAGES.items() if stage in seen.stages_s
    }
    # The first one starts with nothing, those after a failure may take over its imports.
    found["preflight_s"] = statistics.mean(measured[1:] or measured) if measured else None
    found["evaluation_s"] = statistics.mean(seen.evaluations_s) if seen.evaluations_s else None
    return found


def _saves(saves: Sequence[Event], config: Config) -> dict[str, float | None]:
    """Return the bandwidths that give a checkpoint of this configuration its measured times."""
    whole = [number(each, "wall_s") for each in saves if number(each, "wall_s") > 0]
    stalls = [_stall_s(each) for each in saves if each.get("reason") not in ("final", "stop") and _stall_s(each) > 0]
    size = checkpoint_bytes(config)
    found: dict[str, float | None] = {"storage_bytes_per_s": size / statistics.mean(whole) if whole else None}
    if stalls and config.checkpoint.mode == "async":
        found["host_copy_bytes_per_s"] = size / config.cluster.nodes / statistics.mean(stalls)
    return found


def _stall_s(event: Event) -> float:
    return number(event, "stall_s" if "stall_s" in event else "wall_s")


def _training_hours(state: RunState) -> float:
    """Return the hours from the first attempt's start to the newest attempt's last event."""
    if not state.attempts:
        return 0.0
    newest = state.attempts[-1]
    return max(0.0, newest.newest_train_unix_s - state.attempts[0].started_unix_s) / 3600


def _rates(state: RunState, config: Config, hours: float) -> dict[str, float]:
    counts = Counter(KIND_OF_CAUSE[each.cause] for each in state.attempts if each.cause in KIND_OF_CAUSE)
    rates: dict[str, float] = {}
    for kind in typing.get_args(FailureKind):
        hosts = 1 if kind in OF_CLUSTER else config.cluster.nodes
        rates[kind] = float(f"{_RATES_PER * counts[kind] / (hours * hosts):.4g}")
    return rates
