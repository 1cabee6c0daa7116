"""Write reports of runs and comparisons: page, summary, numbers, and each figure and table in the chosen formats.

The page is ``index.html``, one HTML file with its figures inside. It comes with ``summary.md``, ``numbers.json``, the
figures as SVG and CSV files, and tables in LaTeX for a paper.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import conf.load
from conf.of_run import of_run
from hlatctl.report import appendix, compare_tables, contamination, drill, goodput, html_pages, signals, summary
from hlatctl.report.appendix import by_prompt, evenly
from hlatctl.report.baselines import paper_name
from hlatctl.report.compare import Comparison
from hlatctl.report.figures import figures, training
from hlatctl.report.figures.figure import Figure, Series
from hlatctl.report.numbers import Attempt, Milestone, Spikes, Stage
from hlatctl.report.record import Record, read_record
from hlatctl.report.summary import (
    AMENDMENTS,
    amendment_rows,
    contract_note,
    facts,
    headline,
    score_table,
    skipped_notes,
)
from hlatctl.report.tabular import escape_latex, table
from hlatctl.run import files
from hlatctl.run.errors import cannot_write
from hlatctl.run.evaluations import headlines
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
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


def render_page(record: Record, figures: Mapping[str, tuple[str, str]], config_yaml: str) -> str:
    """Return the page as HTML text; ``figures`` has caption and SVG text by name, in order."""
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
        training_stages=(appendix.TRAINING_STAGES_HEADER, appendix.training_stages(record)),
        stage_sources=(appendix.SOURCES_OF_STAGES_HEADER, appendix.sources_of_stages(record)),
        amendment_header=AMENDMENTS,
        amendments=[row for amendment in run.amendments for row in amendment_rows(amendment)],
        incidents=(appendix.INCIDENTS_HEADER, appendix.incidents(record)),
        attempts=[_attempt_row(attempt) for attempt in run.attempts],
        stages=[_stage_row(stage) for stage in run.stages],
        looks=record.looks,
        warnings=run.warnings[-_WARNINGS:],
        older_warnings=max(0, len(run.warnings) - _WARNINGS),
        sources=(appendix.SOURCES_HEADER, appendix.sources(record)),
        data_facts=appendix.data_facts(record) if record.dataset else [],
        environment=appendix.environment_facts(record.provenance),
        config=config_yaml,
        **_provenance(record.provenance),
    )


def _numbered(figures: Mapping[str, tuple[str, str]]) -> dict[str, list[tuple[str, str, str]]]:
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


def latex_tables(record: Record) -> dict[str, str]:
    """Return LaTeX text by name, without empty tables. Labels contain the run's id: a paper has several runs."""
    run, run_id = record.numbers.name or record.numbers.run_id, record.numbers.run_id
    titled: dict[str, tuple[list[str] | tuple[str, ...], list[list[str]], str]] = {
        "summary": (["", ""], _rows([*headline(record), *facts(record.numbers)]), f"Run {run}."),
        "milestones": (*_in_papers(score_table(record.numbers.milestones)), f"Scores of run {run} at its milestones."),
        "signals": (*_in_papers(signals.table(record.signals)), f"Signal of the scores of run {run}."),
        "spikes": (["", ""], _rows(Spikes.of(record.state).facts()), f"Gradient spikes of run {run}."),
        "time": (*goodput.time_table(record.time), f"Wall time of run {run} by category."),
        "incidents": (appendix.INCIDENTS_HEADER, appendix.incidents(record), f"Interruptions of run {run}."),
        "data": (appendix.SOURCES_HEADER, appendix.sources(record), f"Training data of run {run}."),
        "environment": (["", ""], _rows(appendix.environment_facts(record.provenance)), f"Environment of run {run}."),
    }
    found = {
        name: table(header, rows, caption=caption, label=f"tab:{run_id}:{name}")
        for name, (header, rows, caption) in titled.items()
        if rows
    }
    if record.courses.table:
        caption = f"Scores of run {run} next to published ones, ± standard error."
        found["scores"] = compare_tables.latex(record.courses.table, caption, f"tab:{run_id}:scores")
    return found


def _in_papers(found: tuple[list[str], list[list[str]]]) -> tuple[list[str], list[list[str]]]:
    """Return a header and rows with tasks named as in papers; their names are in the first column."""
    header, rows = found
    return header, [[paper_name(row[0]), *row[1:]] for row in rows]


def _rows(named: list[tuple[str, str]]) -> list[list[str]]:
    return [list(pair) for pair in named]


HTML, MARKDOWN, SVG, PNG, PDF, CSV, TEX = "html", "markdown", "svg", "png", "pdf", "csv", "tex"
#: What a run writes at its end.
DEFAULT = (HTML, SVG, CSV)


def build(
    run: RunPaths, formats: Collection[str] = DEFAULT, folder: Path | None = None, *, redraws: bool = True
) -> Path:
    """Write the report from the journal's current events and return the path of its page, or of its folder.

    Args:
        folder: where to write; None: the run's own report folder.
        redraws: draw all figures; otherwise those whose data this code has drawn in the folder before are kept.
    """
    record = read_record(run, of_run(run))
    folder, formats = folder or run.report, {*formats, *[PNG] * (MARKDOWN in formats)}
    drawn = figures(record) if set(formats) - {TEX} else []
    try:
        for name, content in _files(record, drawn, formats, None if redraws else folder):
            if isinstance(content, str):
                files.write_text(folder / name, content)
            else:
                files.write_bytes(folder / name, content)
    except OSError as error:
        raise cannot_write(folder, error) from None
    pages = [name for format_, name in ((HTML, "index.html"), (MARKDOWN, "summary.md")) if format_ in formats]
    return folder / pages[0] if pages else folder


def build_comparison(runs: Sequence[RunPaths], comparison: Comparison, folder: Path, *, latex: bool = False) -> Path:
    """Write a comparison's table and the figure of the runs' losses to a folder, and return the path of the table.

    Args:
        latex: a LaTeX table and a PDF; otherwise Markdown and a PNG.
    """
    titles = [column.title for column in comparison.columns]
    figure = training.losses({title: Series.of(read_state(run)) for title, run in zip(titles, runs, strict=False)})
    name = f"figures/{figure.name}.{PDF if latex else PNG}"
    text = compare_tables.latex(comparison) if latex else compare_tables.markdown(comparison)
    if latex:
        caption = escape_latex(figure.caption)
        text += (
            f"\\begin{{figure}}\n\\centering\n\\includegraphics{{{name}}}\n\\caption{{{caption}}}\n"
            "\\label{fig:comparison}\n\\end{figure}\n"
        )
    else:
        text = "\n".join(["# Comparison\n", text, *summary.pictures({name: figure.caption})])
    path = folder / ("comparison.tex" if latex else "comparison.md")
    try:
        files.write_bytes(folder / name, figure.picture(PDF if latex else PNG))
        files.write_text(folder / f"figures/{figure.name}.csv", figure.csv())
        files.write_text(path, text)
    except OSError as error:
        raise cannot_write(folder, error) from None
    return path


def _files(
    record: Record, drawn: list[Figure], formats: Collection[str], before: Path | None
) -> Iterator[tuple[str, str | bytes]]:
    svgs = {figure.name: _drawn(figure, before) or figure.svg() for figure in drawn if {HTML, SVG} & set(formats)}
    if SVG in formats:
        yield from ((f"figures/{name}.svg", svg) for name, svg in svgs.items())
    for suffix in (PNG, PDF):
        if suffix in formats:
            yield from ((f"figures/{figure.name}.{suffix}", figure.picture(suffix)) for figure in drawn)
    if CSV in formats:
        yield from ((f"figures/{figure.name}.csv", figure.csv()) for figure in drawn)
    if TEX in formats:
        yield from ((f"tables/{name}.tex", text) for name, text in latex_tables(record).items())
    if HTML in formats or MARKDOWN in formats:
        suffix = next((each for each in (PNG, SVG) if each in formats), "")
        linked = {f"figures/{figure.name}.{suffix}": figure.caption for figure in drawn if suffix}
        yield "summary.md", summary.render(record, linked)
    if HTML in formats:
        yield "numbers.json", _numbers(record)
        captioned = {figure.name: (figure.caption, svgs[figure.name]) for figure in drawn}
        yield "index.html", render_page(record, captioned, conf.load.dump(record.config))


def _drawn(figure: Figure, folder: Path | None) -> str:
    """Return a figure as a folder has it; empty if it has none with these data."""
    with suppress(OSError, UnicodeDecodeError):
        if folder and (folder / "figures" / f"{figure.name}.csv").read_text(encoding="utf-8") == figure.csv():
            return (folder / "figures" / f"{figure.name}.svg").read_text(encoding="utf-8")
    return ""


def _numbers(record: Record) -> str:
    numbers = dataclasses.asdict(record.numbers)
    ledger = dataclasses.asdict(record.time)
    return json.dumps({**numbers, "ledger": ledger, "headline": headline(record)}, indent=2) + "\n"
