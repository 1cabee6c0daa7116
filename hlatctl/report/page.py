"""A run's report page: one HTML file with its figures inside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hlatctl.report import (
    compare_tables,
    contamination,
    data_appendix,
    drill,
    environment_appendix,
    goodput,
    html_pages,
    signals,
)
from hlatctl.report.headline import headline
from hlatctl.report.incidents import HEADER as INCIDENTS
from hlatctl.report.incidents import incidents
from hlatctl.report.numbers import Attempt, Milestone, Stage
from hlatctl.report.record import Record
from hlatctl.report.spikes import Spikes
from hlatctl.report.summary import AMENDMENTS, amendment_rows, contract_note, facts, score_table, skipped_notes
from hlatctl.report.texts import by_prompt, evenly
from hlatctl.run.scores import headlines
from hlatctl.units import count, duration, utc

#: Milestones whose texts are on the page. `hlatctl generate RUN --history` prints all.
_TEXTS = 12
#: Newest warnings on the page. `hlatctl logs RUN` prints all.
_WARNINGS = 50
#: The section of each figure by the beginning of its name; the others are in the section on training.
_SECTIONS = {
    "evaluation_": "evaluation",
    "throughput": "performance",
    "data_wait": "performance",
    "scaling": "performance",
    "time": "performance",
    "cost": "performance",
}


def render(record: Record, figures: Mapping[str, tuple[str, str]], config_yaml: str) -> str:
    """Return the page as HTML text.

    Args:
        record: of the run.
        figures: caption and SVG text by name, in order.
        config_yaml: the run's configuration.

    Raises:
        DependencyError: jinja2 is not installed.
    """
    run, time, drilled = record.numbers, record.time, record.drilled
    return html_pages.fill(
        "run.html",
        title=run.run_id,
        kicker=f"{run.experiment_name} · {run.status}",
        created_unix_s=run.created_unix_s,
        simulated=run.simulated,
        facts=headline(record),
        more_facts=facts(run),
        figures=_numbered(figures),
        drill={"outcomes": (drill.HEADER, drill.rows(drilled)), "facts": drill.facts(drilled)} if drilled else None,
        spikes=Spikes.of(record.state).facts() if record.state.spikes else [],
        published=compare_tables.plain(record.courses.table) if record.courses.table else None,
        scores=_scores(run.milestones) if run.milestones else None,
        contamination=_contamination(record.overlaps) if record.overlaps else None,
        signals=(*signals.table(record.signals), signals.note(record.signals)) if record.signals else None,
        texts=by_prompt(evenly(record.texts, _TEXTS)),
        left_out=max(0, len(record.texts) - _TEXTS),
        time={"categories": goodput.time_table(time), "facts": goodput.facts(time)} if time.wall_s else None,
        amendment_header=AMENDMENTS,
        amendments=[row for amendment in run.amendments for row in amendment_rows(amendment)],
        incidents=(INCIDENTS, incidents(record)),
        attempts=[_attempt_row(attempt) for attempt in run.attempts],
        stages=[_stage_row(stage) for stage in run.stages],
        looks=record.looks,
        warnings=run.warnings[-_WARNINGS:],
        older_warnings=max(0, len(run.warnings) - _WARNINGS),
        sources=(data_appendix.HEADER, data_appendix.sources(record)),
        data_facts=data_appendix.facts(record) if record.dataset else [],
        environment=environment_appendix.facts(record.provenance),
        config=config_yaml,
        **_provenance(record.provenance),
    )


def _numbered(figures: Mapping[str, tuple[str, str]]) -> dict[str, list[tuple[str, str, str]]]:
    """Return the name, the numbered caption and the SVG text of the figures of each section."""
    found: dict[str, list[tuple[str, str, str]]] = {"training": [], "evaluation": [], "performance": []}
    for number, (name, (caption, svg)) in enumerate(figures.items(), 1):
        section = next((section for start, section in _SECTIONS.items() if name.startswith(start)), "training")
        found[section].append((name, f"Figure {number}. {caption}", svg))
    return found


def _provenance(provenance: dict[str, Any]) -> dict[str, str]:
    git = provenance.get("git") or {}
    record = {**provenance, **({"git": {key: git[key] for key in git if key != "diff"}} if git else {})}
    text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) if record else ""
    return {"provenance": text, "diff": str(git.get("diff") or "")}


def _scores(milestones: Sequence[Milestone]) -> dict[str, Any]:
    """Return the score table, split into headlines and other scores, and its notes."""
    header, rows = score_table(milestones)
    first = set(headlines([row[0] for row in rows]))
    notes = skipped_notes(milestones)
    notes += [f"{count(m.tokens)} tokens: {m.status}, {m.message}" for m in milestones if m.message]
    return {
        "header": header,
        "headlines": [row for row in rows if row[0] in first],
        "others": [row for row in rows if row[0] not in first],
        "notes": [*notes, *filter(None, [contract_note(milestones)])],
    }


def _contamination(overlaps: contamination.Overlaps) -> dict[str, Any]:
    """Return the table of evaluation items that are in the corpus, and what is not scanned."""
    rows = [list(contamination.cells(row)) for row in overlaps.rows]
    return {"header": list(contamination.HEADER), "rows": rows, "unscanned": ", ".join(overlaps.unscanned)}


def _attempt_row(attempt: Attempt) -> list[str]:
    return [
        str(attempt.number),
        utc(attempt.started_unix_s).removesuffix(" UTC"),
        "running" if attempt.wall_s is None else duration(attempt.wall_s),
        f"{attempt.from_step:,}",
        f"{attempt.last_step:,}",
        f"{attempt.lost_steps:,}",
        attempt.cause or "–",
    ]


def _stage_row(stage: Stage) -> list[str]:
    return [stage.name, stage.status, duration(stage.wall_s) if stage.wall_s else "–", stage.message or "–"]
