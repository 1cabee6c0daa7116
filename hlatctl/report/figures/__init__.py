"""The figures of a run's report. ``figure`` renders them and defines their style."""

from __future__ import annotations

from hlatctl.report.figures import evaluation, spending, training
from hlatctl.report.figures.figure import Figure, Marks, Series
from hlatctl.report.goodput import prices
from hlatctl.report.numbers import Spikes
from hlatctl.report.numbers import scaling as scaling_of
from hlatctl.report.record import Record


def figures(record: Record) -> list[Figure]:
    """Return a run's figures in the order of the page; empty if the run has no steps."""
    state, config, run = record.state, record.config, record.numbers
    if not len(state.steps):
        return []
    series, marks = Series.of(state), Marks.of(run)
    found = [
        training.loss(series, run, marks),
        training.gradient_norm(series, state, marks),
        training.spike_lengths(Spikes.of(state)),
        training.parameter_norm(series, marks),
        training.learning_rate(series, state, config, marks),
        *evaluation.evaluations(record.courses.courses, marks),
        training.throughput(series, marks),
        training.data_wait(series, marks),
        training.scaling(scaling_of(state, config)),
        spending.time(record.time) if record.time.wall_s else None,
        spending.cost(prices(config, record.time, run.tokens)),
    ]
    return [figure for figure in found if figure is not None and _has_data(figure)]


def _has_data(figure: Figure) -> bool:
    """Return whether any value besides tokens is known: a dry run has no throughput."""
    return any(value == value and value is not None for row in figure.rows for value in row[1:])
