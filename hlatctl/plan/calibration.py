"""What `hlatctl speedtest` measured on a cluster, kept for its user, and the planner's numbers fitted to it."""

from __future__ import annotations

import dataclasses
import os
import time
import urllib.parse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config
from hlatctl.plan.published import PublishedRun
from hlatctl.plan.sections import CALIBRATED, DERIVED, GIVEN, MEASURED, Figure, Section
from hlatctl.plan.step_time import step_time_s
from hlatctl.run import files
from hlatctl.run.errors import StorageError

#: Bounds of fitted shares of a peak. A share that changes a step by less than ``_MATTERS`` is not fitted.
_LEAST, _MOST, _MATTERS = 0.02, 1.0, 0.01
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Point:
    """A short training on some nodes.

    Args:
        devices: number of processes, each with a device of its own.
        step_s: median time of a step, without the first ones.
        mfu_fraction: share of the devices' peak; None if the peak is unknown.
        planned_tokens_per_s: what the plan said before this test; None: unknown hardware.
        exchanges: the slowest worker's measurements of exchanges, by their names in ``preflight.json``.
    """

    nodes: int
    devices: int
    tokens_per_s: float
    step_s: float
    mfu_fraction: float | None
    planned_tokens_per_s: float | None
    exchanges: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SpeedTest:
    """A test's results. A plan for the same ``conditions`` uses ``fitted``: numbers of ``cluster.hardware``."""

    cluster: str
    unix_s: float
    conditions: dict[str, str]
    model: str
    points: list[Point]
    fitted: dict[str, float]

    @property
    def date(self) -> str:
        """The day of the test, in UTC."""
        return time.strftime("%Y-%m-%d", time.gmtime(self.unix_s))


def conditions(config: Config) -> dict[str, str]:
    """Return what must be equal for a test to say something about a configuration's speed."""
    return {"engine": config.backend.name, "device": config.backend.device, "precision": config.precision.name}


def place(cluster: str) -> Path:
    """Return the file that keeps the newest test of a cluster, in the user's own folder."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "hlatctl" / "speedtest"
    return folder / f"{urllib.parse.quote(cluster, safe='')}.json"


def keep(test: SpeedTest) -> Path:
    """Write a test in place of the cluster's previous one, and return its file."""
    path = place(test.cluster)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write_sealed_json(path, {"v": _VERSION, **dataclasses.asdict(test)})
    return path


def kept(cluster: str) -> SpeedTest | None:
    """Return the newest test of a cluster; None if there is none.

    Raises:
        StorageError: the file is damaged.
    """
    path = place(cluster)
    try:
        values = files.read_sealed_json(path)
        points = [Point(**point) for point in values["points"]]
        return SpeedTest(**{**{name: values[name] for name in _FIELDS}, "points": points})
    except FileNotFoundError:
        return None
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise StorageError(f"{path}: is damaged ({files.why(error)})", hint=f"rm {path}") from None


_FIELDS = [field.name for field in dataclasses.fields(SpeedTest)]


def calibrated(config: Config, typed: Collection[str] = ()) -> tuple[Config, SpeedTest | None]:
    """Return a configuration with the numbers that a test of its cluster was fitted to, and the test.

    Args:
        typed: names of numbers of ``cluster.hardware`` that the command line sets; they stay.
    """
    test = kept(config.cluster.name)
    if test is None or test.conditions != conditions(config):
        return config, None
    fitted = {name: share for name, share in test.fitted.items() if name not in typed}
    return _with(config, fitted), dataclasses.replace(test, fitted=fitted)


def fit(points: Sequence[tuple[Config, float]]) -> dict[str, float]:
    """Return the shares of the peaks with which the planner gives measured times of a step.

    Args:
        points: configurations that differ in their nodes, with the measured seconds of a step. The one with the fewest
            nodes fits the products' share, the one with the most nodes that of collectives.
    """
    ordered = sorted(points, key=lambda point: point[0].cluster.nodes)
    found: dict[str, float] = {}
    wanted = [("compute_efficiency", *ordered[0])]
    if len(ordered) > 1:
        wanted.append(("collective_efficiency", *ordered[-1]))
    for name, config, step_s in wanted:
        low, high = _LEAST, _MOST
        slowest, fastest = (step_time_s(_with(config, {**found, name: share})) for share in (low, high))
        if slowest is None or fastest is None or slowest - fastest < _MATTERS * slowest:
            continue
        for _ in range(30):
            middle = (low + high) / 2
            planned_s = step_time_s(_with(config, {**found, name: middle}))
            low, high = (middle, high) if planned_s is not None and planned_s > step_s else (low, middle)
        found[name] = round(high, 4)
    return found


def speed_section(test: SpeedTest, *, planned: str = "the plan then", published: PublishedRun | None = None) -> Section:
    """Return a test's figures: speed, scaling and exchanges, next to the plan's before it and to a published speed."""
    first = test.points[0]
    figures = []
    for point in test.points:
        text = f"{point.tokens_per_s:,.0f} tokens/s, {point.tokens_per_s / point.devices:,.0f} a device"
        text += f", a step {point.step_s:.3g} s"
        text += f", MFU {point.mfu_fraction:.1%}" if point.mfu_fraction is not None else ""
        if point is not first:
            share = point.tokens_per_s * first.nodes / first.tokens_per_s / point.nodes
            text += f", {share:.0%} of linear scaling"
        if plan := point.planned_tokens_per_s:
            text += f"; {planned}: {plan:,.0f} tokens/s ({plan / point.tokens_per_s - 1:+.0%})"
        figures.append(Figure(f"{test.model}, nodes: {point.nodes}", point.tokens_per_s, text, MEASURED))
        for name, value in point.exchanges.items():
            figures.append(Figure(f"{name}, nodes: {point.nodes}", value, f"{value:,.1f}", MEASURED))
    if published:
        figures.append(Figure("published, nearest", published.name, published.speed, GIVEN))
    for name, value in test.fitted.items():
        figures.append(Figure(f"cluster.hardware.{name}", value, f"{value:.4g}, fitted to it", CALIBRATED))
    figures.append(
        Figure("kept in", str(place(test.cluster)), f"{place(test.cluster)}; remove it to plan without", DERIVED)
    )
    return Section(f"speed test of {test.cluster} on {test.date}", figures)


def _with(config: Config, numbers: dict[str, float]) -> Config:
    hardware = dataclasses.replace(config.cluster.hardware, **numbers)  # type: ignore[arg-type]
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, hardware=hardware))
