"""`hlatctl compare`: compares runs' scores with each other and with published ones."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import Evaluated, RunsDir, find_evaluated, find_runs, place, print_json, run_names, say, write
from hlatctl.run.errors import ConfigError, EvaluationError

if TYPE_CHECKING:
    from hlatctl.report.compare import Comparison
    from hlatctl.report.paired import Paired

#: Maximum number of tasks that an error names.
_MOST_REASONS = 3


class Format(StrEnum):
    """Format of the table."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"
    LATEX = "latex"


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Run ids, unique beginnings of them, or `latest`.", autocompletion=run_names
        ),
    ],
    baselines: Annotated[str | None, typer.Option(metavar="NAME", help="Published scores to add: hlat.")] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Milestone to compare, such as 200B.  [default: the newest evaluated one]"),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write the table and a figure of the losses here: markdown or latex.", parser=place
        ),
    ] = None,
    paired: Annotated[
        bool, typer.Option("--paired", help="Compare two runs item by item; RUN:TOKENS names a milestone.")
    ] = False,
    flips: Annotated[
        int, typer.Option(help="With --paired: list so many items of each task on which the two differ.", min=0)
    ] = 0,
    runs_dir: RunsDir = None,
) -> None:
    """Compare runs' scores with each other and published ones.

    Marks the best value of each row, or all values that are statistically equal to the best. Compares scores only if
    they have the same contract, and published scores only if shots and items are the same. `--baselines hlat` adds
    HLAT, LLaMA-1 and -2, OpenLLaMA-1 and -2.

    With `--paired` two runs, or two milestones (RUN:200B RUN:400B), are compared question by question: McNemar's test
    or a permutation test, a bootstrap interval, and Holm's correction over all tasks. Questions are paired by document
    and right answer. If contracts or prompts differ, it names what differs besides the models.
    """
    from conf.load import token_count

    if paired:
        if output is not None:
            raise ConfigError(
                f"--output={output}: not with --paired", hint="hlatctl compare … --paired --format json > FILE"
            )
        _compare_items(runs, at, baselines, flips, form, runs_dir)
        return
    if flips:
        raise ConfigError(f"--flips={flips}: items are compared with --paired only", hint="add --paired")
    from hlatctl.report import baselines as published
    from hlatctl.report.compare import compare as compared
    from hlatctl.report.compare import read_scores

    known = published.load(baselines) if baselines is not None else None
    tokens = token_count(at, "--at") if at is not None else None
    found = find_runs(runs, runs_dir)
    comparison = compared([read_scores(run, tokens, lambda text: say(f"warning: {text}")) for run in found], known)
    if output is None:
        _print(comparison, form)
        return
    from hlatctl.report.build import build_comparison

    if form not in (Format.MARKDOWN, Format.LATEX):
        raise ConfigError(f"--output={output}: needs --format markdown or latex", hint="add --format markdown")
    write(build_comparison(found, comparison, output.absolute(), latex=form is Format.LATEX))


def _compare_items(
    names: list[str], at: str | None, baselines: str | None, flips: int, output: Format, runs_dir: Path | None
) -> None:
    from hlatctl.report import paired

    if len(names) != 2:
        raise ConfigError(f"--paired: {len(names)} runs are named, must be two", hint="name a milestone with RUN:200B")
    if baselines is not None:
        raise ConfigError(f"--baselines={baselines}: published scores have no items", hint="leave out --paired")
    if output not in (Format.TEXT, Format.JSON):
        raise ConfigError(f"--format={output.value}: not with --paired", hint="--format text or --format json")
    first, second = (find_evaluated(name, None if ":" in name else at, runs_dir) for name in names)
    found = paired.compare_milestones(
        (first.run, first.milestone), (second.run, second.milestone), lambda text: say(f"warning: {text}")
    )
    if not found.rows:
        raise _no_pairs(found, [first, second])
    if output is Format.JSON:
        print_json(paired.as_json(found, first.title, second.title))
    else:
        write(paired.text(found, first.title, second.title, flips), nl=False)


def _no_pairs(found: Paired, sides: list[Evaluated]) -> EvaluationError:
    from hlatctl.report import items

    bare = [
        side.run.run_id
        for side in sides
        if side.is_imported and not items.files_of(items.folder_of(side.run, side.milestone))
    ]
    if bare:
        return EvaluationError(
            f"--paired: {bare[0]} was imported without items",
            hint="import results that have items; `hlatctl eval import --help` says where they are looked for",
        )
    reasons = "; ".join(f"{name}: {why}" for name, why in islice(found.left_out.items(), _MOST_REASONS))
    return EvaluationError(
        "--paired: the two have no item in common" + (f" ({reasons})" if reasons else ""),
        hint=f"`hlatctl compare {' '.join(side.run.run_id for side in sides)}`",
    )


def _print(comparison: Comparison, output: Format) -> None:
    from hlatctl.report import compare_tables

    if output is Format.JSON:
        print_json(compare_tables.as_json(comparison))
    elif output is Format.MARKDOWN:
        write(compare_tables.markdown(comparison), nl=False)
    elif output is Format.LATEX:
        write(compare_tables.latex(comparison), nl=False)
    else:
        bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        write(compare_tables.text(comparison, bold=bold), nl=False)
