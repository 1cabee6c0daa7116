"""`hlatctl diff`: shows in which keys two runs' configurations differ."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import Json, RunName, RunsDir, columns, find_run, print_json, say
from hlatctl.cli.completion import run_names

#: Value of a key that a configuration doesn't have.
_MISSING = object()


def diff(
    first: RunName,
    second: Annotated[str, typer.Argument(metavar="RUN", help="Run to compare it with.", autocompletion=run_names)],
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show the configuration keys in which two runs differ.

    If a run doesn't have a key, its value is shown as `-`, and as null in JSON.
    """
    from conf.load import flatten
    from conf.of_run import of_run

    runs = [find_run(name, runs_dir) for name in (first, second)]
    one, other = (flatten(of_run(run)) for run in runs)
    keys = [key for key in {**one, **other} if one.get(key, _MISSING) != other.get(key, _MISSING)]
    if as_json:
        print_json({key: [one.get(key), other.get(key)] for key in keys})
    elif keys:
        rows = [[key, _text(one.get(key, _MISSING)), _text(other.get(key, _MISSING))] for key in keys]
        typer.echo(columns([["KEY", *(run.run_id for run in runs)], *rows]))
    else:
        say("the configurations are equal")


def _text(value: object) -> str:
    if value is _MISSING:
        return "-"
    return "null" if value is None else str(value)
