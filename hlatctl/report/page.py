"""The report's page: one HTML file that needs nothing else, from numbers and figures."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from string import Template
from typing import Any

from hlatctl.report import drill, goodput
from hlatctl.report.drill import Drill
from hlatctl.report.figures import SCORES, TIME
from hlatctl.report.goodput import Goodput
from hlatctl.report.numbers import Attempt, Numbers, Stage
from hlatctl.report.summary import contract_note, facts, score_table
from hlatctl.run.scores import headlines
from hlatctl.run.simulated import MARK, REPORT
from hlatctl.units import count, duration, utc

_CAPTIONS = {
    "loss": "Loss in training, and on held-out text at the milestones. Here and below, dashed lines are restarts.",
    "gradient_norm": "Gradient norm before clipping. Triangles are spikes: 0.1 above the mean of the last 20 steps.",
    "parameter_norm": "Norm of all parameters.",
    "learning_rate": "Learning rate.",
    TIME: "The run's wall time by what it went to; the table below has the same in figures.",
    SCORES: "Scores over training; those of tasks that a figure sums up, and of further metrics, are in the tables.",
    "throughput": "Throughput, and the share of each step spent waiting for data.",
}
_ATTEMPT_HEADER = ("attempt", "started (UTC)", "took", "from step", "to step", "done again", "ended", "then")

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light; --ink: #1b1f24; --quiet: #667080; --rule: #dfe3e8; --accent: #1c4e80; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 3rem 1.5rem 5rem; max-width: 52rem; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.2; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { margin: 3rem 0 .75rem; font-size: 1.15rem; }
.kicker { margin: 0 0 .3rem; color: var(--quiet); font-size: .9rem; }
.banner { margin: 0 0 2rem; padding: .7rem 1rem; border-left: 4px solid #c4561a; background: #fdf1ea; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1.1rem 1.5rem;
  margin: 2rem 0 0; }
.tiles div { border-top: 1px solid var(--rule); padding-top: .45rem; }
dt { color: var(--quiet); font-size: .85rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { margin: 1.75rem 0; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--quiet); font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .9rem .4rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { color: var(--quiet); font-weight: 500; white-space: nowrap; }
td.number { white-space: nowrap; }
details { margin-top: .75rem; border-top: 1px solid var(--rule); padding-top: .6rem; }
summary { cursor: pointer; color: var(--accent); }
pre { overflow-x: auto; padding: .9rem 1rem; background: #f6f7f9;
  font: .8rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
.quiet { color: var(--quiet); font-size: .9rem; }
</style>
</head>
<body>
$body
</body>
</html>
""")


def render(
    found: Numbers,
    time: Goodput,
    drilled: Drill | None,
    figures: dict[str, str],
    config_yaml: str,
    provenance: dict[str, Any],
) -> str:
    """The page as HTML text.

    Args:
        drilled: what a fire drill has shown; None for a run that was not drilled.
        figures: SVG text by name, as ``figures.draw`` gives it.
        config_yaml: the run's configuration.
        provenance: the content of ``provenance.json``; empty if there is none.
    """
    sections = [
        _head(found, time),
        _drill(drilled),
        _training(figures),
        _scores(found, figures),
        _time(time, figures),
        _attempts(found.attempts),
        _stages(found.stages),
        _warnings(found),
        _origin(config_yaml, provenance),
    ]
    return document(found.run_id, sections)


def document(title: str, sections: Iterable[str]) -> str:
    """A page of sections of HTML; empty ones are left out."""
    return _PAGE.substitute(title=escape(f"{title} · hlatctl"), body="\n".join(filter(None, sections)))


def _head(found: Numbers, time: Goodput) -> str:
    kicker = f"{found.experiment_name} · made {utc(found.created_unix_s)}"
    return heading(found.run_id, kicker, facts(found, time), simulated=found.simulated)


def heading(title: str, kicker: str, tiles: Iterable[tuple[str, str]], *, simulated: bool) -> str:
    """What a page begins with: a title, a line above it, and facts by name."""
    banner = f'<p class="banner"><strong>{MARK}</strong> — {REPORT}</p>\n' if simulated else ""
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in tiles)
    return f'{banner}<p class="kicker">{escape(kicker)}</p>\n<h1>{escape(title)}</h1>\n<dl class="tiles">{shown}</dl>'


def _drill(drilled: Drill | None) -> str:
    if drilled is None:
        return ""
    outcomes, follows = table(drill.HEADER, drill.rows(drilled)), table(("besides", ""), drill.facts(drilled))
    return f"<h2>Fire drill</h2>\n{outcomes}\n{follows}"


def _training(figures: dict[str, str]) -> str:
    if not figures:
        return '<h2>Training</h2>\n<p class="quiet">No step has been made yet.</p>'
    return "\n".join(
        [
            "<h2>Training</h2>",
            *(figure(svg, _CAPTIONS[name]) for name, svg in figures.items() if name not in (SCORES, TIME)),
        ]
    )


def figure(svg: str, caption: str) -> str:
    """A figure and what stands below it."""
    # As an image: ids inside one SVG can't meet those of another.
    data = base64.b64encode(svg.encode()).decode()
    caption = escape(caption)
    image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _time(time: Goodput, figures: dict[str, str]) -> str:
    if not time.wall_s:
        return ""
    drawn = figure(figures[TIME], _CAPTIONS[TIME]) if TIME in figures else ""
    split, follows = table(*goodput.time_table(time)), table(("what follows from it", ""), goodput.facts(time))
    return "\n".join(filter(None, ["<h2>Time</h2>", drawn, split, follows]))


def _scores(found: Numbers, figures: dict[str, str]) -> str:
    if not found.milestones:
        return '<h2>Scores</h2>\n<p class="quiet">No milestone has been reached.</p>'
    header, rows = score_table(found.milestones)
    notes = sorted({f"{task}: skipped, {why}" for m in found.milestones for task, why in m.skipped.items()})
    notes += [f"{count(m.tokens)} tokens: {m.status}, {m.message}" for m in found.milestones if m.message]
    notes += filter(None, [contract_note(found.milestones)])
    listed = "".join(f'<p class="quiet">{escape(note)}</p>\n' for note in notes)
    first = set(headlines([row[0] for row in rows]))
    shown, others = ([row for row in rows if (row[0] in first) == wanted] for wanted in (True, False))
    if others:
        folded = f"<details><summary>Further scores: {len(others)}</summary>\n{table(header, others)}\n</details>\n"
        listed = folded + listed
    drawn = figure(figures[SCORES], _CAPTIONS[SCORES]) + "\n" if SCORES in figures else ""
    return f"<h2>Scores</h2>\n{drawn}{table(header, shown)}\n{listed}"


def _attempts(attempts: list[Attempt]) -> str:
    if not attempts:
        return ""
    rows = [
        [
            str(a.number),
            utc(a.started_unix_s).removesuffix(" UTC"),
            "goes on" if a.wall_s is None else duration(a.wall_s),
            f"{a.from_step:,}",
            f"{a.last_step:,}",
            f"{a.lost_steps:,}",
            ": ".join(filter(None, [a.cause, a.evidence])) or "–",
            ": ".join(filter(None, [a.decision, a.why])) or "–",
        ]
        for a in attempts
    ]
    return f"<h2>Attempts</h2>\n{table(_ATTEMPT_HEADER, rows)}"


def _stages(stages: list[Stage]) -> str:
    if not stages:
        return ""
    rows = [[s.name, s.status, duration(s.wall_s) if s.wall_s else "–", s.message or "–"] for s in stages]
    return f"<h2>Stages</h2>\n{table(('stage', 'status', 'took', 'remark'), rows)}"


def _warnings(found: Numbers) -> str:
    if not found.warnings:
        return ""
    return "<h2>Warnings</h2>\n" + "".join(f"<p>{escape(warning)}</p>\n" for warning in found.warnings)


def _origin(config_yaml: str, provenance: dict[str, Any]) -> str:
    git = provenance.get("git") or {}
    diff = str(git.get("diff") or "")
    record = {**provenance, "git": {key: value for key, value in git.items() if key != "diff"}} if git else provenance
    parts = ["<h2>Where it comes from</h2>"]
    if git.get("commit"):
        changed = " with uncommitted changes" if git.get("dirty") else ""
        parts.append(f'<p class="quiet">Commit {escape(str(git["commit"]))}{changed}.</p>')
    parts.append(details("Configuration", config_yaml))
    if provenance:
        parts.append(details("Provenance", json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)))
    if diff:
        parts.append(details("Uncommitted changes", diff))
    return "\n".join(parts)


def details(title: str, text: str) -> str:
    """Text that is shown when a person asks for it."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text.rstrip())}</pre></details>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _cell(text: str) -> str:
    kind = ' class="number"' if text[:1].isdigit() or text[:1] in ("+", "-", "–") else ""
    return f"<td{kind}>{escape(text)}</td>"
