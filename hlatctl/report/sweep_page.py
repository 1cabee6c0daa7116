"""A sweep's report as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hlatctl.report import html_pages
from hlatctl.report.summary import table as markdown_table
from hlatctl.report.sweep import arms, facts, header, rows
from hlatctl.run.simulated import MARK, REPORT
from hlatctl.run.sweep import SweepState
from hlatctl.units import count

_TRIAL_HEADER = ["trial", "arm", "seed", "value", "tokens", "hours", "status", "reason"]


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The best arm.

    Args:
        text: its setting.
        command: shell command that trains it.
        experiment: YAML for ``conf/experiment``.
    """

    text: str
    command: str
    experiment: str


def render(state: SweepState, figures: Mapping[str, str], winner: Winner | None) -> str:
    """Return the page as HTML text.

    Args:
        state: the sweep.
        figures: SVG text by name.
        winner: None if no trial has a value.

    Raises:
        DependencyError: jinja2 is not installed.
    """
    return html_pages.fill(
        "sweep.html",
        title=state.sweep_id,
        kicker="sweep",
        created_unix_s=state.created_unix_s,
        simulated=state.simulated,
        facts=facts(state)[1:],
        figures=figures,
        arms={
            "header": header(state),
            "rows": rows(state),
            "have_seeds": any(trial.seed is not None for trial in state.trials.values()),
        },
        trials={"header": _TRIAL_HEADER, "rows": trial_rows(state)},
        winner=winner,
    )


def markdown(state: SweepState, importances: Mapping[str, float], winner: Winner | None) -> str:
    """Return the page's content as Markdown, without figures."""
    parts = [f"# {state.sweep_id}\n"]
    if state.simulated:
        parts.append(f"**{MARK}**: {REPORT}\n")
    parts += [markdown_table(["", ""], [list(fact) for fact in facts(state)[1:]]), "## Arms\n"]
    parts.append(markdown_table(header(state), rows(state)))
    if importances:
        shares = [[key, f"{100 * share:.0f} %"] for key, share in importances.items()]
        parts += ["## Importance of the axes\n", markdown_table(["axis", "share"], shares)]
    if winner:
        parts += ["## The best arm\n", f"    {winner.command}\n"]
    parts += ["## Trials\n", markdown_table(_TRIAL_HEADER, trial_rows(state))]
    return "\n".join(parts)


def trial_rows(state: SweepState) -> list[list[str]]:
    """Return a row per trial, those of the best arm first."""
    return [
        [
            trial.run_id,
            str(trial.arm),
            "–" if trial.seed is None else str(trial.seed),
            "–" if trial.value is None else f"{trial.value:.4f}",
            count(trial.tokens),
            f"{trial.process_hours:.3g}",
            trial.status,
            trial.why or "–",
        ]
        for arm in arms(state)
        for trial in arm.trials
    ]
