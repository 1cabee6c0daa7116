"""A run's report in a screenful of Markdown: the summary file, and Prefect's artifact."""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import Config
from hlatctl.report.goodput import Goodput, measure_goodput
from hlatctl.report.numbers import Milestone, Numbers, Score, comparable, numbers
from hlatctl.run.fold import fold
from hlatctl.run.journal import Event
from hlatctl.run.simulated import MARK, REPORT
from hlatctl.units import count, duration

#: Marks scores that can't be compared with the others of their row.
_OTHER = "†"


def summary_markdown(events: Sequence[Event], config: Config) -> str:
    """The summary of a journal, as Markdown."""
    return render(numbers(fold(events), config), measure_goodput(events, config))


def render(found: Numbers, time: Goodput) -> str:
    """Numbers as Markdown."""
    parts = [f"# {found.run_id}\n"]
    if found.simulated:
        parts.append(f"**{MARK}**: {REPORT}\n")
    parts.append(table(["", ""], [[name, value] for name, value in facts(found, time)]))
    if found.milestones:
        parts.append("## Scores\n")
        parts.append(table(*score_table(found.milestones)))
        parts += [f"{note}\n" for note in [contract_note(found.milestones)] if note]
    if len(found.attempts) > 1:
        parts.append("## Attempts\n")
        rows = [[str(a.number), f"{a.from_step} to {a.last_step}", a.cause or "goes on", a.why] for a in found.attempts]
        parts.append(table(["attempt", "steps", "ended", "then"], rows))
    parts.extend(f"Warning: {warning}\n" for warning in found.warnings)
    return "\n".join(parts)


def facts(found: Numbers, time: Goodput) -> list[tuple[str, str]]:
    """The few facts that a person looks for first, name and text; what is not known is left out."""
    known = [
        ("status", found.status + (f": {found.message}" if found.message else "")),
        ("sweep", found.sweep),
        ("model", found.evaluates),
        ("steps", "" if found.evaluates else f"{found.step:,} of {found.total_steps:,}"),
        ("tokens", "" if found.evaluates else f"{count(found.tokens)} of {count(found.total_tokens)}"),
        ("training loss", _change(found.first_loss, found.last_loss)),
        ("validation loss", _text(found.validation_loss, "{:.4f}")),
        ("throughput", _text(found.tokens_per_s, "{:,.0f} tokens/s")),
        ("model FLOPs utilisation", _percent(found.mfu_fraction)),
        ("waiting for data", _percent(found.data_wait_fraction)),
        ("goodput (ETTR)", _percent(time.ettr_fraction)),
        ("uptime", _percent(time.uptime_fraction)),
        ("attempts", f"{len(found.attempts)}, {found.lost_steps} steps done again" if found.attempts else ""),
        ("gradient spikes", str(found.gradient_spikes)),
        ("wall time", duration(time.wall_s)),
    ]
    return [(name, text) for name, text in known if text]


def score_table(milestones: Sequence[Milestone]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a task a row, a milestone a column, ``value ± standard error`` in the cells.

    An evaluation under another contract has a column of its own, and what can't be compared with the first score of its
    row is marked.
    """
    tasks = {score.task: score.metric for milestone in milestones for score in milestone.scores}
    header = ["task", "metric", *(_title(milestone) for milestone in milestones)]
    rows = [[task, metric, *_cells(milestones, task)] for task, metric in sorted(tasks.items())]
    return header, rows or [["none yet", "", *(milestone.status for milestone in milestones)]]


def contract_note(milestones: Sequence[Milestone]) -> str:
    """What the mark in a score table means; empty if it has none."""
    marked = any(_OTHER in cell for row in score_table(milestones)[1] for cell in row)
    return (
        f"{_OTHER}: measured under another contract than the first score of its row; not comparable." if marked else ""
    )


def _title(milestone: Milestone) -> str:
    at = f"{count(milestone.tokens)} tokens" if milestone.tokens else "score"
    return at + ("" if milestone.is_own else f", contract {milestone.contract[:8] or 'unknown'}")


def _cells(milestones: Sequence[Milestone], task: str) -> list[str]:
    same = {id(score) for _, score in comparable(milestones, task)}
    scores = [milestone.score(task) for milestone in milestones]
    return [score_text(score) + (f" {_OTHER}" if score and id(score) not in same else "") for score in scores]


def score_text(score: Score | None) -> str:
    """A score with its standard error; a dash where there is none."""
    if score is None or score.value is None:
        return "–"
    digits = 1 if abs(score.value) >= 100 else 3
    error = f" ± {score.stderr:.{digits}f}" if score.stderr is not None else ""
    return f"{score.value:.{digits}f}{error}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table of texts, as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |\n" for line in lines
    )


def _change(first: float | None, last: float | None) -> str:
    return f"{last:.4f}, from {first:.4f}" if first is not None and last is not None else ""


def _text(value: float | None, template: str) -> str:
    return "" if value is None else template.format(value)


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f} %"
