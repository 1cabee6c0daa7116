"""`hlatctl compare`: runs' scores beside one another and beside published ones, as HLAT's tables have them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import RunsDir, find_run, print_json, read_state, say
from hlatctl.run import contract as contracts
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, EvaluationError
from hlatctl.run.milestones import find_milestone
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import DAMAGED
from hlatctl.units import count

if TYPE_CHECKING:
    from hlatctl.report.compare import Comparison, RunScores
    from hlatctl.run.state import MilestoneState

_EVALUATED = "evaluated"


class Format(StrEnum):
    """What the table is printed as."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"
    LATEX = "latex"


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run ids, unique beginnings of them, or `latest`.")],
    baselines: Annotated[
        str | None, typer.Option(metavar="NAME", help="Published scores to add: hlat.", show_default=False)
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Milestone to compare, such as 200B.  [default: the newest evaluated one]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
    runs_dir: RunsDir = None,
) -> None:
    """Compare runs' scores with each other and published ones.

    Marks the best value of each row, or all values that are statistically equal to the best. Compares scores only if
    they have the same contract, and published scores only if shots and items are the same. `--baselines hlat` adds
    HLAT, LLaMA-1 and -2, OpenLLaMA-1 and -2.
    """
    from conf.load import token_count
    from hlatctl.report import baselines as published
    from hlatctl.report.compare import compare as compared

    known = published.load(baselines) if baselines is not None else None
    tokens = token_count(at, "--at") if at is not None else None
    _print(compared([_scores(run, tokens) for run in _find(runs, runs_dir)], known), output)


def _print(found: Comparison, output: Format) -> None:
    from hlatctl.report import compare_tables

    if output is Format.JSON:
        print_json(compare_tables.as_json(found))
    elif output is Format.MARKDOWN:
        typer.echo(compare_tables.markdown(found), nl=False)
    elif output is Format.LATEX:
        typer.echo(compare_tables.latex(found), nl=False)
    else:
        bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        typer.echo(compare_tables.text(found, bold=bold), nl=False)


def _find(names: Iterable[str], runs_dir: Path | None) -> list[RunPaths]:
    """The runs in the order they were named, each once."""
    found: dict[str, RunPaths] = {}
    for name in names:
        run = find_run(name, runs_dir)
        if run.run_id in found:
            raise ConfigError(f"RUN={name}: {run.run_id} is named twice", hint="name every run once")
        found[run.run_id] = run
    return list(found.values())


def _scores(run: RunPaths, tokens: int | None) -> RunScores:
    from hlatctl.report.compare import run_scores

    state = read_state(run)
    milestone = _milestone(run, state.milestones, tokens)
    return run_scores(
        run.run_id, milestone, simulated=state.simulated, contract=_contract(run, milestone), recorded=_recorded(run)
    )


def _recorded(run: RunPaths) -> list[contracts.Fields]:
    """The contracts that the run has admitted; of a damaged record, none, so that what it said is unknown."""
    try:
        return contracts.recorded(run)
    except EvaluationError as error:
        say(f"warning: {error.message}")
        return []


def _milestone(run: RunPaths, milestones: dict[int, MilestoneState], tokens: int | None) -> MilestoneState:
    """The newest evaluated milestone, or the one of so many tokens."""
    evaluated = {at: milestone for at, milestone in milestones.items() if milestone.status == _EVALUATED}
    if not evaluated:
        waiting = ", ".join(f"{count(at)} {milestone.status}" for at, milestone in sorted(milestones.items()))
        raise EvaluationError(
            f"{run.run_id}: has no evaluated milestone" + (f" ({waiting})" if waiting else ""),
            hint=f"`hlatctl status {run.run_id}` shows the run's state",
        )
    if tokens is None:
        return evaluated[max(evaluated)]
    status = f" (its status is {milestones[tokens].status})" if tokens in milestones else ""
    error = f"--at={count(tokens)}: {run.run_id} has no evaluated milestone of {tokens:,} tokens{status}"
    return evaluated[find_milestone(tokens, evaluated, error)]


def _contract(run: RunPaths, milestone: MilestoneState) -> str | None:
    """What the milestone was measured under: as the journal says, or results.json if it holds the journal's scores."""
    if milestone.contract:
        return str(milestone.contract)
    try:
        record = files.read_json(run.eval(milestone.milestone_tokens) / "results.json")
        return str(record["contract"]) if record["scores"] == milestone.scores else None
    except (OSError, *DAMAGED):
        return None
