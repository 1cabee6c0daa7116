"""The main facts of a run, and its summary in Markdown for ``summary.md`` and Prefect's artifact.

Page, summary, tables, ``numbers.json`` and the terminal at a run's end take these texts from here, so they can't
differ. `hlatctl status` and the live page show a run in other words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from conf.schema import Config
from conf.sizes import has_shape, parameters
from hlatctl.report import ladder, signals
from hlatctl.report.appendix import SOURCES_OF_STAGES_HEADER, TRAINING_STAGES_HEADER, sources_of_stages, training_stages
from hlatctl.report.baselines import PERCENT
from hlatctl.report.compare import Cell
from hlatctl.report.goodput import Price, prices
from hlatctl.report.numbers import LOSS_WINDOW_STEPS, Amendment, Milestone, Numbers, Score, comparable
from hlatctl.report.record import Record, read_record
from hlatctl.report.scores import Course
from hlatctl.run.evaluations import skipped_in_words
from hlatctl.run.labels import MARK, REPORT
from hlatctl.run.paths import RunPaths
from hlatctl.units import count, duration, number, size, tags_text, utc, value_text

#: Maximum rows of scores; the tables have all.
_MOST_SCORES = 8
#: Published models shown next to a score: the paper's, and the strongest baseline in its tables.
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
        ("training loss", _training_loss(record)),
        ("validation loss", "" if run.validation_loss is None else f"{run.validation_loss:.4f} nats per token"),
        *(ladder.facts(made, ladder.result_of_run(record.state)) if (made := record.state.forecast) else ()),
        *_scores(record.courses.courses),
    ]
    return [(name, text) for name, text in known if text]


def _model(config: Config) -> str:
    model, counts = config.model, parameters(config.model)
    size = f"{count(counts.total)} parameters"
    if counts.active != counts.total:
        size += f" ({count(counts.active)} active)"
    shape = f", {model.num_layers} layers of width {model.hidden_size:,}" if has_shape(model) else ""
    return f"{model.name}: {size}{shape}"


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


def _training_loss(record: Record) -> str:
    """Return the loss of the newest step, as lists of runs show it, and means, which one step doesn't change."""
    run, newest = record.numbers, record.state.last_step
    if newest is None or run.first_loss is None or run.last_loss is None:
        return ""
    means = f"means of up to {LOSS_WINDOW_STEPS} steps: first {run.first_loss:.4f}, last {run.last_loss:.4f}"
    return f"{number(newest, 'loss'):.4f} at step {newest['step']:,}; {means}"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f} %"


#: Marks scores that can't be compared with the first score of their row.
_OTHER = "†"
#: Header of the scores of guessing.
GUESSING = "guessing"


def summary_markdown(run: RunPaths, config: Config) -> str:
    """Return the summary of a run as Markdown."""
    return render(read_record(run, config))


def render(record: Record, figures: Mapping[str, str] | None = None) -> str:
    """Return the summary as Markdown; ``figures`` has captions by the path of the image next to the file."""
    run = record.numbers
    parts = [f"# {_escaped(run.run_id)}\n"]
    if run.simulated:
        parts.append(f"**{MARK}**: {REPORT}\n")
    parts.append(table(["", ""], [[name, value] for name, value in [*headline(record), *facts(run)]]))
    if run.milestones:
        parts.append("## Scores\n")
        parts.append(table(*score_table(run.milestones)))
        parts += [f"{_escaped(note)}\n" for note in skipped_notes(run.milestones)]
        parts += [f"{note}\n" for note in [contract_note(run.milestones)] if note]
    if record.signals:
        parts.append("## Signal\n")
        parts += [table(*signals.table(record.signals)), f"{signals.note(record.signals)}\n"]
    if stages := training_stages(record):
        parts.append("## Stages of training\n")
        parts.append(table([*TRAINING_STAGES_HEADER], stages))
        if read := sources_of_stages(record):
            parts.append(table([*SOURCES_OF_STAGES_HEADER], read))
    if run.amendments:
        parts.append("## Amendments\n")
        parts.append(table(AMENDMENTS, [row for amendment in run.amendments for row in amendment_rows(amendment)]))
    if len(run.attempts) > 1:
        parts.append("## Attempts\n")
        rows = [[str(a.number), f"{a.from_step} to {a.last_step}", a.cause or "running", a.why] for a in run.attempts]
        parts.append(table(["attempt", "steps", "cause of end", "reason for the decision"], rows))
    parts += pictures(figures or {})
    parts.extend(f"Warning: {_escaped(warning)}\n" for warning in run.warnings)
    return "\n".join(parts)


def pictures(figures: Mapping[str, str]) -> list[str]:
    """Return a section with figures as Markdown; empty without figures."""
    shown = [
        f"![Figure {at}]({path})\n\nFigure {at}. {_escaped(text)}\n"
        for at, (path, text) in enumerate(figures.items(), 1)
    ]
    return ["## Figures\n", *shown] if shown else []


def facts(run: Numbers) -> list[tuple[str, str]]:
    """Return the known facts of a run except its headline, as name and text."""
    known = [
        ("status", run.status + (f": {run.message}" if run.message else "")),
        ("name", run.name),
        ("tags", tags_text(run.tags)),
        ("notes", " · ".join(run.notes)),
        ("sweep", run.sweep),
        ("forked from", run.forked_from),
        ("throughput", "" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f} tokens/s, median of the steps"),
        ("peak memory", "" if run.peak_memory_bytes is None else size(run.peak_memory_bytes)),
        (
            "waiting for data",
            "" if run.data_wait_fraction is None else f"{100 * run.data_wait_fraction:.1f} % of steps",
        ),
        ("attempts", f"{len(run.attempts)}, {run.lost_steps} steps redone" if run.attempts else ""),
        ("gradient spikes (HLAT's rule)", str(run.gradient_spikes)),
    ]
    return [(name, text) for name, text in known if text]


#: Header of :func:`amendment_rows`.
AMENDMENTS = ["amendment", "made (UTC)", "by", "begins", "key", "from", "to", "reason"]


def amendment_rows(amendment: Amendment) -> list[list[str]]:
    """Return a row for each key that an amendment changes."""
    made = utc(amendment.time_unix_s).removesuffix(" UTC")
    head = [str(amendment.number), made, amendment.by, amendment.begins]
    pairs = ((key, value_text(old), value_text(new)) for key, (old, new) in amendment.changes.items())
    return [[*head, *pair, amendment.why] for pair in pairs]


def score_table(milestones: Sequence[Milestone]) -> tuple[list[str], list[list[str]]]:
    """Return a header and a row per task, with a column per milestone and ``value ± standard error`` in the cells.

    An evaluation under another contract has its own column. Scores that can't be compared with the first score of their
    row are marked. The score of guessing has a column if some task has one.
    """
    tasks = {score.task: score for milestone in milestones for score in milestone.scores}
    guessed = any(score.chance is not None for score in tasks.values())
    others = list(dict.fromkeys(milestone.contract for milestone in milestones if not milestone.is_own))
    header = ["task", "metric", *[GUESSING] * guessed, *(_title(milestone, others) for milestone in milestones)]
    rows = [
        [task, score.metric, *[_guessing(score)] * guessed, *_cells(milestones, task)]
        for task, score in sorted(tasks.items())
    ]
    return header, rows or [["none yet", "", *(milestone.status for milestone in milestones)]]


def skipped_notes(milestones: Sequence[Milestone]) -> list[str]:
    """Return which tasks of some milestone could not run, and why."""
    return sorted({line for milestone in milestones for line in skipped_in_words(milestone.skipped)})


def contract_note(milestones: Sequence[Milestone]) -> str:
    """Return the meaning of the mark in a score table; empty if no score is marked."""
    marked = any(_OTHER in cell for row in score_table(milestones)[1] for cell in row)
    return f"{_OTHER}: its contract differs from that of the first score of its row; not comparable." if marked else ""


def _guessing(score: Score) -> str:
    return "–" if score.chance is None else f"{score.chance:.3f}"


def _title(milestone: Milestone, others: Sequence[str]) -> str:
    at = f"{count(milestone.tokens)} tokens" if milestone.tokens else "score"
    return at if milestone.is_own else f"{at}, contract {others.index(milestone.contract) + 2}"


def _cells(milestones: Sequence[Milestone], task: str) -> list[str]:
    same = {id(score) for _, score in comparable(milestones, task)}
    scores = [milestone.score(task) for milestone in milestones]
    return [score_text(score) + (f" {_OTHER}" if score and id(score) not in same else "") for score in scores]


def score_text(score: Score | None) -> str:
    """Return a score with its standard error; a dash if there is no score."""
    if score is None or score.value is None:
        return "–"
    digits = 1 if abs(score.value) >= 100 else 3
    error = f" ± {score.stderr:.{digits}f}" if score.stderr is not None else ""
    return f"{score.value:.{digits}f}{error}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table of plain text as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(_escaped, line)) + " |\n" for line in lines)


def _escaped(plain: str) -> str:
    return re.sub(r"([\\|<])", r"\\\1", plain.replace("\n", " "))
