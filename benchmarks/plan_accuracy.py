"""The planner compared with published step times and memory of other people's runs, with errors.

Each fitted number was fitted to one figure of one run; the runs name the numbers. All others are predictions.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from conf.compose import compose
from conf.schema import ClusterConfig
from hlatctl.plan.published import PublishedRun, published_runs

_GIB = 1 << 30
#: Goals for figures to which nothing was fitted: median and largest error of step times and of memory, in percent.
GOALS = {"step": (7.0, 26.0), "memory": (5.0, 15.0)}
#: The tables of docs/planning.md are between these lines.
BEGIN, END = "<!-- begin: python -m benchmarks plan_accuracy -->", "<!-- end -->"

#: Pairs of published runs that differ in the number of devices alone.
_PAIRS = (
    ("Llama 3.1 8B on {} H100, eager", "8", "128"),
    ("Llama 3.1 8B on {} H100, compiled", "8", "128"),
    ("Llama 3.1 8B on {} H100, compiled, FP8", "8", "128"),
    ("Llama 3.1 8B on {} H200, FP8", "32", "64"),
    ("MPT 7B on {} H100", "8", "128"),
    ("MPT 7B on {} H100", "128", "512"),
    ("MPT 13B on {} H100", "128", "512"),
    ("MPT 30B on {} H100", "128", "512"),
    ("MPT 70B on {} H100", "128", "512"),
    ("GPT 530B on {} A100, TP 8 x PP 35", "280", "2,240"),
)


@cache
def cluster_of(name: str) -> ClusterConfig:
    """Return a cluster configuration of ``conf/cluster``."""
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


@dataclass(frozen=True)
class Scaled:
    """How much longer a step takes on more nodes if each device's work stays the same."""

    name: str
    published_fraction: float
    planned_fraction: float


def scaling(runs: Iterable[PublishedRun]) -> list[Scaled]:
    """Return the published pairs of runs that differ in nothing but the number of nodes."""
    by_name, rows = {one.name: one for one in runs}, []
    for form, few, many in _PAIRS:
        small, large = by_name[form.format(few)], by_name[form.format(many)]
        published, planned = large.published_step_s / small.published_step_s, large.time.total_s / small.time.total_s
        rows.append(Scaled(f"{form.format(many)}, than on {few}", published - 1.0, planned - 1.0))
    return rows


def tables(runs: list[PublishedRun]) -> str:
    """Return the errors of each group and of each run, as tables for docs/planning.md."""
    lines = ["| error of figures to which nothing was fitted | figures | median | worst |", "|---|---|---|---|"]
    for what, errors_of in (("step time", step_errors), ("memory", memory_errors)):
        for number, name in enumerate(("first", "second", "third", "fourth"), start=1):
            if errors := errors_of(one for one in runs if one.collection == number):
                middle, worst = statistics.median(errors), max(errors)
                lines.append(f"| {what}, {name} collection | {len(errors)} | {middle:.1f} % | {worst:.1f} % |")
    lines += ["", "| longer step for the same work of a device | published | planned |", "|---|---|---|"]
    for row in scaling(runs):
        lines.append(f"| {row.name} | {row.published_fraction:+.1%} | {row.planned_fraction:+.1%} |")
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
