"""`hlatctl eval export` and `hlatctl eval import`: scores in the forms of other evaluators."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hlatctl.cli.common import Name, Note, RunsDir, Tags, place, print_json, say, user_name, with_runs_dir, write
from hlatctl.cli.milestone import At, EvaluatedRun, find_evaluated
from hlatctl.run.errors import EvaluationError
from hlatctl.units import counted


class Form(StrEnum):
    """Whose form of results is written."""

    LM_EVAL = "lm_eval"
    LIGHTEVAL = "lighteval"
    OLMES = "olmes"


def export(
    run: EvaluatedRun,
    at: At = None,
    form: Annotated[
        Form, typer.Option("--format", help="Form: of lm-evaluation-harness, lighteval or OLMES.")
    ] = Form.LM_EVAL,
    runs_dir: RunsDir = None,
) -> None:
    """Print a milestone's scores as a results file of another evaluator.

    The scores stay those that lm-evaluation-harness computed; only the file's form is another's.
    """
    from hlatctl.report.exchange import exported, lighteval_form, lm_eval_form, olmes_form

    as_form = {Form.LM_EVAL: lm_eval_form.write, Form.LIGHTEVAL: lighteval_form.write, Form.OLMES: olmes_form.write}[
        form
    ]
    found = find_evaluated(run, at, runs_dir)
    if found.is_imported:
        raise EvaluationError(
            f"run {found.run.run_id}: has scores that were imported, which are not written as its own",
            hint="copy the file that they were imported from",
        )
    print_json(as_form(exported.read(found.run, found.milestone)))


def import_scores(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Results file of lm-evaluation-harness, lighteval or OLMES, or a folder with one.",
            parser=place,
        ),
    ],
    name: Name = None,
    tag: Tags = None,
    note: Note = "",
    runs_dir: RunsDir = None,
) -> None:
    """Import the scores of others as a run, to compare runs with them.

    Prints the run's id. Reads a results_*.json of lm-evaluation-harness or lighteval, and a metrics.json or
    metrics-all.jsonl of OLMES. The run has only scores, their origin, and the items
    if the evaluator wrote them: lm_eval --log_samples and OLMES beside the file,
    lighteval --save-details below its output folder. `hlatctl compare` ranks an imported
    score only if the file says enough of how it was measured, and this agrees.
    """
    from conf.compose import compose
    from flows import import_scores as flow
    from hlatctl.report.exchange import source
    from hlatctl.run import labels as run_labels
    from hlatctl.run.labels import change
    from hlatctl.run.scratch import private_folder

    labels = change(name=name, tags=tag or (), note=note)
    with private_folder("import") as own:
        found = source.read(file, own.path)
        run = flow.create(compose(with_runs_dir(None, runs_dir)), found, argv=sys.argv)
    run_labels.write(run, labels, by=user_name())
    items = f", and items of {counted(len(found.samples), 'task')}," if found.samples else ""
    say(f"{len(found.figures.figures)} scores{items} imported from {found.path} in {run.root}")
    write(run.run_id)
