"""The planner beside everything that others have published about their runs: step times and memory, with errors.

Each fitted number was fitted to one figure of one run; the runs name the numbers. All others are predictions.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import cache

from conf.compose import compose
from conf.schema import ClusterConfig
from hlatctl.plan.published_runs import PublishedRun, published_runs

_GIB = 1 << 30
#: Goals for figures to which nothing was fitted: median and largest error of step times and of memory, in percent.
GOALS = {"step": (8.0, 21.0), "memory": (5.0, 15.0)}
#: The tables of docs/planning.md are between these lines.
BEGIN, END = "<!-- begin: python -m tests.benchmarks plan_accuracy -->", "<!-- end -->"


@cache
def cluster_of(name: str) -> ClusterConfig:
    """Return the cluster configuration of a name, as it is in ``conf/cluster``."""
    return compose([f"cluster={name}", "train.global_batch_size=32"]).cluster


def run() -> None:
    """Print each run, the errors of each group, and the tables of docs/planning.md."""
    runs = published_runs(cluster_of)
    print(f"{'run':76}{'published':>14}{'planned':>14}{'error':>8}{'GiB':>7}{'planned':>9}{'error':>8}  fitted to it")
    for one in runs:
        print(_line(one))
    refused = [one.name for one in runs if one.memory.fits is False]
    print(f"refused although they ran: {', '.join(refused) or 'none'}")
    print(f"\n{tables(runs)}")


def step_errors(runs: Iterable[PublishedRun]) -> list[float]:
    """Return the sizes of the errors of step times to which nothing was fitted, in percent."""
    return [100 * abs(one.step_error_fraction) for one in runs if not one.calibrates]


def memory_errors(runs: Iterable[PublishedRun]) -> list[float]:
    """Return the same of published peaks of memory."""
    errors = (one.memory_error_fraction for one in runs if not one.calibrates_memory)
    return [100 * abs(error) for error in errors if error is not None]


def tables(runs: list[PublishedRun]) -> str:
    """Return the errors of each group and of each run, as tables for docs/planning.md."""
    first, later = ([one for one in runs if one.further is further] for further in (False, True))
    groups = {
        "step time, first collection": step_errors(first),
        "step time, runs added later": step_errors(later),
        "memory, first collection": memory_errors(first),
        "memory, runs added later": memory_errors(later),
    }
    lines = ["| error of figures to which nothing was fitted | figures | median | worst |", "|---|---|---|---|"]
    for name, errors in groups.items():
        lines.append(f"| {name} | {len(errors)} | {statistics.median(errors):.1f} % | {max(errors):.1f} % |")
    lines += ["", "| run | step error | memory error | fitted to it |", "|---|---|---|---|"]
    return "\n".join([*lines, *(_row(one) for one in runs)])


def _row(one: PublishedRun) -> str:
    fitted = ", ".join(f"`{number}`" if "_" in number else number for number in one.fits)
    return f"| {one.name} | {_percent(one.step_error_fraction)} | {_percent(one.memory_error_fraction)} | {fitted} |"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{round(100 * error, 1) + 0.0:+.1f} %"


def _line(one: PublishedRun) -> str:
    step = f"{one.published_step_s:>12.2f} s{one.time.total_s:>12.2f} s{one.step_error_fraction:>+8.1%}"
    error = one.memory_error_fraction
    planned = f"{one.memory.need_bytes / _GIB:>9.1f}"
    memory = f"{'-':>7}{planned}{'-':>8}" if error is None else f"{one.memory_gib:>7.1f}{planned}{error:>+8.1%}"
    return f"{one.name:76}{step}{memory}  {', '.join(one.fits)}".rstrip()
