"""The main facts of a run: the first screen of its report, its Markdown summary, and the terminal's last lines.

Page, summary, tables and ``numbers.json`` take these texts from here, and so does the terminal at a run's end, so that
they can't differ. `hlatctl status` and the live page show a run in other words.
"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import Config
from conf.sizes import parameters
from hlatctl.report.baselines import PERCENT
from hlatctl.report.cells import Cell
from hlatctl.report.cost import Price, prices
from hlatctl.report.numbers import Numbers
from hlatctl.report.record import Record
from hlatctl.report.scores import Course
from hlatctl.units import count, duration

#: Rows of scores; the tables have all.
_MOST_SCORES = 8
#: The published models that a score is shown beside: the paper's, and the strongest baseline in its tables.
_BESIDE = ("HLAT-7B", "LLaMA-2-7B")

Fact = tuple[str, str]


def headline(record: Record) -> list[Fact]:
    """Return the known main facts of a run, as name and text."""
    run, time = record.numbers, record.time
    priced = prices(record.config, time, run.tokens)
    cost = "" if time.cost_usd is None else f"{time.cost_usd:,.0f} USD{_of_baseline(priced, record.config)}"
    known = [
        ("model", run.evaluates or _model(record.config)),
        ("imported from", run.imported),
        ("tokens", "" if run.evaluates else _tokens(run)),
        ("hardware", "" if run.imported else _hardware(record.config)),
        ("wall time", duration(time.wall_s) if time.wall_s else ""),
        ("cost", cost),
        ("MFU", _percent(run.mfu_fraction)),
        ("goodput", _goodput(record)),
        ("training loss", _change(run.first_loss, run.last_loss)),
        ("validation loss", "" if run.validation_loss is None else f"{run.validation_loss:.4f} nats per token"),
        *_scores(record.courses.courses),
    ]
    return [(name, text) for name, text in known if text]


def _model(config: Config) -> str:
    model = config.model
    size = count(parameters(model).total)
    return f"{model.name}: {size} parameters, {model.num_layers} layers of width {model.hidden_size:,}"


def _tokens(run: Numbers) -> str:
    if run.step >= run.total_steps:
        return f"{count(run.tokens)} in {run.step:,} steps"
    return f"{count(run.tokens)} of {count(run.total_tokens)}, step {run.step:,} of {run.total_steps:,}"


def _hardware(config: Config) -> str:
    cluster = config.cluster
    nodes = f"{cluster.nodes:,} node{'s' * (cluster.nodes > 1)}"
    nodes += f" (and {cluster.spare_nodes:,} spare)" if cluster.spare_nodes else ""
    each = cluster.processes_per_node
    return f"{cluster.name}: {nodes} with {each:,} {config.backend.device} process{'es' * (each > 1)}" + (
        " each" if cluster.nodes > 1 else ""
    )


def _goodput(record: Record) -> str:
    shares = [("ETTR", record.time.ettr_fraction), ("uptime", record.time.uptime_fraction)]
    return ", ".join(f"{_percent(share)} {name}" for name, share in shares if share is not None)


def _of_baseline(priced: list[Price], config: Config) -> str:
    """Return the cost as a share of the baseline's; empty without a baseline."""
    name, share = config.cluster.baseline.name or "the baseline", priced[0].of_baseline_fraction if priced else None
    return "" if share is None else f", {100 * share:.0f} % of {name}"


def _scores(courses: list[Course]) -> Iterator[Fact]:
    for course in courses[:_MOST_SCORES]:
        beside = (f"{name} {_value(course, cell)}" for name, cell in course.published.items() if name in _BESIDE)
        others = ", ".join(beside)
        text = f"{_value(course, course.points[-1][1])}, {course.how}"
        yield course.row.group, text + (f" (published: {others})" if others else "")


def _value(course: Course, cell: Cell) -> str:
    digits, unit = (1, " %") if course.row.unit == PERCENT else (3, "")
    error = "" if cell.stderr is None else f" ± {cell.stderr:.{digits}f}"
    return f"{cell.value:.{digits}f}{error}{unit}"


def _change(first: float | None, last: float | None) -> str:
    return f"{last:.4f}, from {first:.4f}" if first is not None and last is not None else ""


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f} %"
