"""Curves of a run: its steps as numpy columns, reduced to as many points as a page can show, and previews of them.

A run of 2 M steps has 96 MB of columns. They are built once and then extended by new rows, so that a request costs one
pass over them: about 10 ms for each curve.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.sizes import flops_per_token, mfu
from hlatctl.report.live.index import OpenRun
from hlatctl.run import step_metrics
from hlatctl.run.errors import ConfigError, suggest
from hlatctl.run.files import DAMAGED
from hlatctl.run.journal import TRAIN_WRITER, Event, no_steps, parse_line
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState
from hlatctl.run.step_metrics import STEP_METRICS, TIME
from hlatctl.run.steps import StepSeries

if TYPE_CHECKING:
    from conf.schema import Config

#: Curves that are no field of a step.
_DERIVED = {"mfu": "", "validation_loss": "nats/token"}
AXES = {"step": "", "tokens": "tokens", "time": "s", "flops": "FLOPs"}
DEFAULT_POINTS, MOST_POINTS = 1500, 20_000
#: Newest steps without a finite loss that are named.
_MOST_SKIPPED = 2000
#: Tallest spikes that are marked.
_MOST_SPIKES = 2000
#: Places of a journal that a preview reads, bytes of each, and the least number of steps found.
_SAMPLES, _SAMPLE_BYTES, _LEAST_SAMPLED = 500, 4096, 50
#: A smaller journal, of about 50,000 steps, has no preview: it is read in two seconds.
_LEAST_BYTES = 16 << 20
_WHOLE = ("step", "tokens")
_DRAWN = tuple(metric.name for metric in STEP_METRICS if metric.drawn and metric.kept)
_STORED: dict[str, Any] = {"step": np.int64, "tokens": np.int64, TIME: np.float64, **dict.fromkeys(_DRAWN, np.float32)}
Columns = dict[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True, kw_only=True)
class CurvesRequest:
    """A page's request for curves.

    Args:
        keys: names of curves; None: all that the run has.
        points: maximum number of points per curve.
        every: steps of each point instead, so that the points of several runs are at the same steps; None: as many
            steps as ``points`` needs.
        first_step, last_step: the part of the run; None: from the beginning, or to the end.
        x: ``step``, ``tokens``, ``time`` (Unix seconds) or ``flops``.
    """

    keys: tuple[str, ...] | None = None
    points: int = DEFAULT_POINTS
    every: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    x: str = "step"

    def __post_init__(self) -> None:
        if self.x not in AXES:
            raise ConfigError(f"x={self.x}: no such axis", hint=suggest(self.x, list(AXES)))
        if not 1 <= self.points <= MOST_POINTS:
            raise ConfigError(f"points={self.points}: must be 1 to {MOST_POINTS}", hint=f"points={DEFAULT_POINTS}")
        if self.every is not None and self.every < 1:
            raise ConfigError(f"every={self.every}: must be at least 1", hint="every=10")


@dataclass
class StepColumns:
    """The steps of a run that count, as growing columns.

    Args:
        ranges: rows of the fold that the columns contain.
    """

    ranges: list[list[int]] = field(default_factory=list)
    length: int = 0
    _columns: Columns = field(default_factory=lambda: {name: np.empty(0, kind) for name, kind in _STORED.items()})

    @property
    def nbytes(self) -> int:
        """Memory of the columns."""
        return sum(column.nbytes for column in self._columns.values())

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self._columns[name][: self.length]

    @property
    def drawn(self) -> list[str]:
        """The numbers that can be a curve, in the order of the page."""
        return [*_DRAWN, *(name for name in self._columns if name not in _STORED)]

    def update(self, steps: StepSeries) -> None:
        """Make the columns equal to the steps. The cost grows with the number of new rows."""
        kept, missing = _split(self.ranges, steps.ranges)
        self.length = kept
        for name in steps.rows.others:
            self._columns.setdefault(name, np.full(self.length, np.nan, np.float32))
        for start, stop in missing:
            for columns, first, last in steps.rows.blocks(start, stop):
                places = {name: steps.rows.place(name) for name in self._columns}
                parts = {name: columns[at][first:last] for name, at in places.items() if at < len(columns)}
                self._append(parts, last - first)
        self.ranges = [list(part) for part in steps.ranges]

    def _append(self, parts: dict[str, Any], count: int) -> None:
        end = self.length + count
        for name, column in list(self._columns.items()):
            part = parts.get(name)
            if end > len(column):
                grown = np.empty(max(end, len(column) + len(column) // 2, 1024), column.dtype)
                grown[: self.length] = column[: self.length]
                self._columns[name] = column = grown
            kind = np.int64 if name in _WHOLE else np.float64
            with np.errstate(over="ignore"):
                column[self.length : end] = np.nan if part is None else np.frombuffer(part, kind)
        self.length = end


def curves(steps: StepColumns, state: RunState, config: Config | None, request: CurvesRequest) -> dict[str, Any]:
    """Return the requested curves; the page's contract documents the fields.

    Args:
        steps: columns that are up to date with the state.
        config: None if it can't be read: then there is no MFU and no axis of FLOPs.
    """
    names, found = [*steps.drawn, *_DERIVED], available(steps, state, config)
    keys = found if request.keys is None else request.keys
    for key in keys:
        if key not in names:
            raise ConfigError(f"keys={key}: no such curve", hint=suggest(key, names))
    part = _part(steps["step"], request)
    numbers = steps["step"][part]
    axis = _axis(steps, config, request.x)
    edges = _edges(numbers, request)
    series = {
        key: _reduced(_values(steps, state, config, key)[part], edges) for key in keys if key != "validation_loss"
    }
    if "validation_loss" in keys:
        series["validation_loss"] = _validation(steps, state, axis)
    ends = edges[1:] - 1 if len(numbers) else edges[:0]
    return {
        "x": request.x,
        "x_unit": AXES[request.x],
        "steps": numbers[ends],
        "xs": axis[part][ends],
        "tokens": steps["tokens"][part][ends],
        "times": steps[TIME][part][ends],
        "series": series,
        "milestones": [{"x": x, "tokens": tokens, "step": step} for tokens, step, x in _milestones(steps, state, axis)],
        "spikes": _spikes(steps, state, axis),
        "skipped": axis[part][~np.isfinite(steps["loss"][part])][-_MOST_SKIPPED:],
        "available": found,
        "metrics": {key: _described(key) for key in found},
        "newest_step": state.step,
        "began_unix_s": steps[TIME][0] if steps.length else None,
    }


def preview(opened: OpenRun, request: CurvesRequest) -> dict[str, Any] | None:
    """Return curves of a few steps of a long run that is still being read; None for a short one.

    They have no milestones and spikes, and a step between two points may be further from them than it seems.
    """
    steps = StepSeries()
    for event in _sampled(opened.run):
        if event["step"] <= steps.newest:
            steps.supersede(after=event["step"] - 1)
        with suppress(*DAMAGED):
            steps.add(event)
    if len(steps) < _LEAST_SAMPLED:
        return None
    columns = StepColumns()
    columns.update(steps)
    return {**curves(columns, RunState(steps=steps), opened.config, request), "preview": len(steps)}


def _sampled(run: RunPaths) -> Iterator[Event]:
    """Yield steps at even distances of the largest file that has steps. Reads 2 MiB."""
    with suppress(OSError):
        files = [path for path in run.journal.glob(f"{TRAIN_WRITER}*.jsonl") if path.is_file()]
        if not files:
            return
        with max(files, key=lambda path: path.stat().st_size).open("rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes < _LEAST_BYTES:
                return
            last = max(0, size_bytes - _SAMPLE_BYTES)
            for number in range(_SAMPLES + 1):
                for line in os.pread(file.fileno(), _SAMPLE_BYTES, last * number // _SAMPLES).split(b"\n")[1:-1]:
                    event = None if no_steps(line) else parse_line(line)
                    if event:
                        yield event
                        break


def available(steps: StepColumns, state: RunState, config: Config | None) -> list[str]:
    """Return the names of the curves that the run has, in the order of the page."""
    found = [name for name in steps.drawn if bool(np.isfinite(steps[name]).any())]
    if config and state.peak_flops_per_s and "tokens_per_s" in found:
        found.insert(found.index("tokens_per_s") + 1, "mfu")
    if any("validation_loss" in milestone.scores for milestone in state.milestones.values()):
        found.insert(min(1, len(found)), "validation_loss")
    return found


def _described(key: str) -> dict[str, Any]:
    if key == "validation_loss":
        return {"title": "Validation loss", "unit": _DERIVED[key], "steep": False}
    metric = step_metrics.of(key)
    return {"title": metric.title, "unit": metric.unit, "steep": metric.steep}


def _split(before: list[list[int]], after: list[list[int]]) -> tuple[int, list[tuple[int, int]]]:
    kept = 0
    for index, (start, stop) in enumerate(after):
        old = before[index] if index < len(before) else None
        if old == [start, stop]:
            kept += stop - start
            continue
        same = min(old[1], stop) if old and old[0] == start else start
        rest = [(first, last) for first, last in after[index + 1 :]]
        return kept + same - start, [(same, stop), *rest]
    return kept, []


def _part(steps: np.ndarray[Any, Any], request: CurvesRequest) -> slice:
    first = 0 if request.first_step is None else int(np.searchsorted(steps, request.first_step))
    last = len(steps) if request.last_step is None else int(np.searchsorted(steps, request.last_step, "right"))
    return slice(first, max(first, last))


def _axis(steps: StepColumns, config: Config | None, x: str) -> np.ndarray[Any, Any]:
    if x == "flops":
        per_token = flops_per_token(config.model, config.train.seq_len) if config else math.nan
        return np.asarray(steps["tokens"] * float(per_token))
    return steps[{"time": TIME}.get(x, x)]


def _values(steps: StepColumns, state: RunState, config: Config | None, key: str) -> np.ndarray[Any, Any]:
    scale = step_metrics.of(key).scale
    if key != "mfu":
        return steps[key] if scale == 1 else np.asarray(steps[key] / np.float32(scale))
    one = mfu(config, 1.0, state.peak_flops_per_s) if config else None
    return np.asarray(steps["tokens_per_s"] * np.float32(math.nan if one is None else one / scale))


def _edges(steps: np.ndarray[Any, Any], request: CurvesRequest) -> np.ndarray[Any, Any]:
    """Return the places where groups of steps begin, and the end of the last one."""
    count = len(steps)
    if request.every is None:
        groups = min(count, request.points)
        return np.arange(groups + 1, dtype=np.int64) * count // max(groups, 1)
    starts = np.flatnonzero(np.diff((steps - 1) // request.every, prepend=-1))
    if len(starts) > MOST_POINTS:
        least = math.ceil(request.every * len(starts) / MOST_POINTS)
        raise ConfigError(f"every={request.every}: gives more than {MOST_POINTS:,} points", hint=f"every={least}")
    return np.append(starts, count)


def _reduced(values: np.ndarray[Any, Any], edges: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return mean, least and largest finite value of each group; NaN where a group has none."""
    if not len(values):
        return {"y": [], "low": [], "high": []}
    finite, starts = np.isfinite(values), edges[:-1]
    counts = np.add.reduceat(finite, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(finite, values, 0).astype(np.float64), starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    none = counts == 0
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (sums / counts).astype(np.float32)  # half the bytes of an answer
    return {"y": means, "low": np.where(none, np.nan, low), "high": np.where(none, np.nan, high)}


def _milestones(steps: StepColumns, state: RunState, axis: np.ndarray[Any, Any]) -> list[tuple[int, int, float | None]]:
    known = sorted(state.milestones.items())
    places = _at(steps, axis, [milestone.step for _, milestone in known])
    return [(tokens, milestone.step, place) for (tokens, milestone), place in zip(known, places, strict=True)]


def _spikes(steps: StepColumns, state: RunState, axis: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    """Return the tallest spikes with the gradient norm of their own steps, which a point of many steps doesn't show."""
    numbers = np.array([int(spike["step"]) for spike in state.spikes], np.int64)
    rows = np.searchsorted(steps["step"], numbers)
    rows = rows[np.isin(numbers, steps["step"][rows[rows < steps.length]])]
    norms = steps["grad_norm"][rows]
    if len(rows) > _MOST_SPIKES:
        rows = np.sort(rows[np.argsort(np.nan_to_num(norms, nan=-1.0))[-_MOST_SPIKES:]])
    return [{"x": x, "y": norm} for x, norm in zip(axis[rows], steps["grad_norm"][rows], strict=True)]


def _at(steps: StepColumns, axis: np.ndarray[Any, Any], wanted: list[int]) -> list[float | None]:
    found: list[float | None] = []
    for step in wanted:
        at = int(np.searchsorted(steps["step"], step))
        there = at < steps.length and int(steps["step"][at]) == step
        found.append(float(axis[at]) if there else None)
    return found


def _validation(steps: StepColumns, state: RunState, axis: np.ndarray[Any, Any]) -> dict[str, Any]:
    from hlatctl.units import number

    scored = [
        (step, x, number(state.milestones[tokens].scores["validation_loss"], "value"))
        for tokens, step, x in _milestones(steps, state, axis)
        if "validation_loss" in state.milestones[tokens].scores
    ]
    return {"steps": [s for s, _, _ in scored], "xs": [x for _, x, _ in scored], "y": [y for _, _, y in scored]}
