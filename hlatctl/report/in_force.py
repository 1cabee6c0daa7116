"""What was in force when: values that amendments have changed, over the course of a run; pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from conf.load import flatten
from conf.schema import Config
from hlatctl.run.state import RunState

_NODES, _SPARE, _PER_NODE = "cluster.nodes", "cluster.spare_nodes", "cluster.processes_per_node"


def value_of(key: str, number: int, state: RunState, config: Config) -> Any:
    """Return the value of a key after an amendment.

    Args:
        key: its dotted name.
        number: of the amendment; 0: as the run was created.
        state: of the run.
        config: of the run, with all amendments.
    """
    later = (a.changes[key][0] for a in state.amendments if a.number > number and key in a.changes)
    return next(later, flatten(config)[key])


def mean_processes(state: RunState, config: Config) -> float:
    """Return the number of training processes, averaged over the run's time."""
    return _mean(state, config, lambda value: value(_NODES) * value(_PER_NODE))


def mean_paid_nodes(state: RunState, config: Config) -> float:
    """Return the number of nodes that are paid for, averaged over the run's time."""
    return _mean(state, config, lambda value: value(_NODES) + value(_SPARE))


def size_since_step(state: RunState) -> int:
    """Return the last step that was trained by another number of processes than the newest; 0: none was."""
    changed = (a for a in state.amendments if {_NODES, _PER_NODE} & set(a.changes))
    return max((a.applied_step for a in changed if a.applied_step is not None), default=0)


def _mean(state: RunState, config: Config, size: Callable[[Callable[[str], int]], int]) -> float:
    """Average a size over the time of the attempts; each lasts until the next one begins."""

    def at(number: int) -> int:
        return size(partial(value_of, number=number, state=state, config=config))

    starts = [(attempt.started_unix_s, attempt.config_number) for attempt in state.attempts]
    if not starts:
        return at(0)
    ends = [*(start for start, _ in starts[1:]), max(state.last_event_unix_s, starts[-1][0])]
    spans = [(max(0.0, end - start), number) for (start, number), end in zip(starts, ends, strict=True)]
    total_s = sum(span for span, _ in spans)
    return sum(span * at(number) for span, number in spans) / total_s if total_s > 0 else at(starts[-1][1])
