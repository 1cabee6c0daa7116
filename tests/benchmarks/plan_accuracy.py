"""The planner beside everything that others have published about their runs: step times and memory, with errors.

Each fitted number of a cluster was fitted to the runs marked *calibrates*. All others are predictions.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import cache

from conf.compose import compose
from conf.schema import ClusterConfig
from hlatctl.plan.published_runs import PublishedRun, published_runs

_GIB = 1 << 30
#: Goals for the first collection of runs: median and largest error of step times, largest error of memory, in percent.
GOALS = {"median": 8.0, "worst": 20.0, "memory": 8.0}


@cache
def cluster_of(name: str) -> ClusterConfig:
    """Return the cluster configuration of a name, as it is in ``conf/cluster``."""
    return compose([f"cluster={name}", "train.global_batch_size=32"]).cluster


def percent(errors: Iterable[float | None]) -> list[float]:
    """Return the sizes of the errors that are known, in percent."""
    return [100 * abs(error) for error in errors if error is not None]


def run() -> None:
    """Print each run, and the errors of each group."""
    runs = published_runs(cluster_of)
    print(f"{'run':70}{'published':>14}{'planned':>14}{'error':>8}{'GiB':>7}{'planned':>9}{'error':>8}  use")
    for one in runs:
        print(_line(one))
    first = [one for one in runs if not one.further]
    _summary("step times, first collection", (one.step_error_fraction for one in first))
    predicted = (one.step_error_fraction for one in first if not one.calibrates)
    _summary("step times, those of them to which nothing was fitted", predicted)
    _summary("step times, further runs", (one.step_error_fraction for one in runs if one.further))
    _summary("memory", (one.memory_error_fraction for one in runs))
    _summary("memory, with the workspace fitted to the other peaks", _left_out(first))
    refused = [one.name for one in runs if one.memory.fits is False]
    print(f"refused although they ran: {', '.join(refused) or 'none'}")


def _left_out(runs: list[PublishedRun]) -> list[float]:
    """Return each peak's error if ``workspace_bytes`` were the least-squares fit to all other peaks."""
    known = [(one.memory.need_bytes / _GIB, _workspace_gib(one), one.memory_gib) for one in runs if one.memory_gib]
    points = [((need - workspace) / peak - 1.0, 1.0 / peak) for need, workspace, peak in known]
    errors = []
    for left in points:
        others = [point for point in points if point is not left]
        fitted_gib = -sum(error * weight for error, weight in others) / sum(weight**2 for _, weight in others)
        errors.append(left[0] + fitted_gib * left[1])
    return errors


def _workspace_gib(one: PublishedRun) -> float:
    return one.config.cluster.hardware.workspace_bytes / _GIB


def _line(one: PublishedRun) -> str:
    use = "calibrates" if one.calibrates else "further check" if one.further else "check"
    step = f"{one.published_step_s:>12.2f} s{one.time.total_s:>12.2f} s{one.step_error_fraction:>+8.1%}"
    error = one.memory_error_fraction
    planned = f"{one.memory.need_bytes / _GIB:>9.1f}"
    memory = f"{'-':>7}{planned}{'-':>8}" if error is None else f"{one.memory_gib:>7.1f}{planned}{error:>+8.1%}"
    return f"{one.name:70}{step}{memory}  {use}"


def _summary(title: str, fractions: Iterable[float | None]) -> None:
    errors = percent(fractions)
    print(f"{title}: {len(errors)}, median error {statistics.median(errors):.1f} %, worst {max(errors):.1f} %")
