"""A sweep's report as a page and as Markdown, from its state, its figures and what has won."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from hlatctl.report import page
from hlatctl.report.summary import table as markdown_table
from hlatctl.report.sweep import arms, facts, header, rows
from hlatctl.report.sweep_figures import IMPORTANCES, LOSS, SETTINGS
from hlatctl.run.simulated import MARK, REPORT
from hlatctl.run.sweep import SweepState
from hlatctl.units import count, utc

_TRIAL_HEADER = ["trial", "arm", "seed", "value", "tokens", "hours", "how", "why"]
_CAPTIONS = {
    LOSS: "Training loss of every trial, in the colour of its arm, the best first. A cross: ended early, or failed.",
    SETTINGS: "What each arm was set to, and what came of it. The best one is the thick line.",
    IMPORTANCES: "How much of the difference between trials each axis explains by itself (fANOVA).",
}


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The best arm, ready to be trained.

    Args:
        text: its setting.
        command: for a shell.
        experiment: YAML for ``conf/experiment``.
    """

    text: str
    command: str
    experiment: str


def render(state: SweepState, figures: Mapping[str, str], winner: Winner | None) -> str:
    """The page as HTML text.

    Args:
        state: of the sweep.
        figures: SVG text by name.
        winner: None if no trial has a value.
    """
    drawn = [page.figure(figures[name], _CAPTIONS[name]) for name in (LOSS, SETTINGS, IMPORTANCES) if name in figures]
    sections = [
        page.heading(
            state.sweep_id, f"sweep · made {utc(state.created_unix_s)}", facts(state)[1:], simulated=state.simulated
        ),
        "<h2>Arms</h2>\n" + _arms(state),
        *drawn,
        _winner(winner),
        "<h2>Trials</h2>\n" + page.table(_TRIAL_HEADER, trial_rows(state)) if state.trials else "",
    ]
    return page.document(state.sweep_id, sections)


def markdown(state: SweepState, importances: Mapping[str, float], winner: Winner | None) -> str:
    """The same as Markdown, without figures."""
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
    """A trial a row, those of the best arm first."""
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


def _arms(state: SweepState) -> str:
    if not state.trials:
        return '<p class="quiet">No trial has been asked for yet.</p>'
    note = "Off the best: the mean over seeds of the difference, with its standard error." if _has_seeds(state) else ""
    return page.table(header(state), rows(state)) + (f'\n<p class="quiet">{note}</p>' if note else "")


def _has_seeds(state: SweepState) -> bool:
    return any(trial.seed is not None for trial in state.trials.values())


def _winner(winner: Winner | None) -> str:
    if winner is None:
        return ""
    return (
        f"<h2>The best arm</h2>\n<p>{escape(winner.text)}</p>\n"
        f'<pre style="white-space: pre-wrap">{escape(winner.command)}</pre>\n'
        + page.details("As an experiment: best.yaml, to be put into conf/experiment", winner.experiment)
    )
