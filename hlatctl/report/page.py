"""A run's report page: one HTML file with its figures inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hlatctl.report import drill, goodput, html_pages
from hlatctl.report.drill import Drill
from hlatctl.report.goodput import Goodput
from hlatctl.report.look_inside import Look
from hlatctl.report.numbers import Attempt, Milestone, Numbers, Stage
from hlatctl.report.summary import AMENDMENTS, amendment_rows, contract_note, facts, score_table
from hlatctl.report.texts import by_prompt, evenly
from hlatctl.run.continuations import Kept
from hlatctl.run.scores import headlines
from hlatctl.units import count, duration, utc

#: Milestones whose texts are on the page. `hlatctl generate RUN --history` prints all.
_TEXTS = 12


def render(
    run: Numbers,
    time: Goodput,
    drilled: Drill | None,
    figures: dict[str, str],
    config_yaml: str,
    provenance: dict[str, Any],
    texts: Sequence[Kept] = (),
    looks: Sequence[Look] = (),
) -> str:
    """Return the page as HTML text.

    Args:
        drilled: None if the run was not drilled.
        figures: SVG text by name, from ``figures.draw``.
        config_yaml: the run's configuration.
        provenance: the content of ``provenance.json``; empty if there is none.
        texts: continuations of ``eval.prompts``, by milestone.
        looks: profiles and evidence of hangs, which the page links to.

    Raises:
        DependencyError: jinja2 is not installed.
    """
    git = provenance.get("git") or {}
    record = {**provenance, **({"git": {key: git[key] for key in git if key != "diff"}} if git else {})}
    return html_pages.fill(
        "run.html",
        title=run.run_id,
        kicker=run.experiment_name,
        created_unix_s=run.created_unix_s,
        simulated=run.simulated,
        facts=facts(run, time),
        figures=figures,
        drill={"outcomes": (drill.HEADER, drill.rows(drilled)), "facts": drill.facts(drilled)} if drilled else None,
        scores=_scores(run.milestones) if run.milestones else None,
        texts=by_prompt(evenly(texts, _TEXTS)),
        left_out=max(0, len(texts) - _TEXTS),
        time={"categories": goodput.time_table(time), "facts": goodput.facts(time)} if time.wall_s else None,
        amendment_header=AMENDMENTS,
        amendments=[row for amendment in run.amendments for row in amendment_rows(amendment)],
        attempts=[_attempt_row(attempt) for attempt in run.attempts],
        stages=[_stage_row(stage) for stage in run.stages],
        looks=looks,
        warnings=run.warnings,
        git={"commit": git.get("commit"), "dirty": git.get("dirty"), "diff": str(git.get("diff") or "")},
        config=config_yaml,
        provenance=json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) if record else "",
    )


def _scores(milestones: Sequence[Milestone]) -> dict[str, Any]:
    """Return the score table, split into headlines and other scores, and its notes."""
    header, rows = score_table(milestones)
    first = set(headlines([row[0] for row in rows]))
    notes = sorted({f"{task}: skipped, {why}" for milestone in milestones for task, why in milestone.skipped.items()})
    notes += [f"{count(m.tokens)} tokens: {m.status}, {m.message}" for m in milestones if m.message]
    return {
        "header": header,
        "headlines": [row for row in rows if row[0] in first],
        "others": [row for row in rows if row[0] not in first],
        "notes": [*notes, *filter(None, [contract_note(milestones)])],
    }


def _attempt_row(attempt: Attempt) -> list[str]:
    return [
        str(attempt.number),
        utc(attempt.started_unix_s).removesuffix(" UTC"),
        "running" if attempt.wall_s is None else duration(attempt.wall_s),
        f"{attempt.from_step:,}",
        f"{attempt.last_step:,}",
        f"{attempt.lost_steps:,}",
        ": ".join(filter(None, [attempt.cause, attempt.evidence])) or "–",
        ": ".join(filter(None, [attempt.decision, attempt.why])) or "–",
    ]


def _stage_row(stage: Stage) -> list[str]:
    return [stage.name, stage.status, duration(stage.wall_s) if stage.wall_s else "–", stage.message or "–"]
