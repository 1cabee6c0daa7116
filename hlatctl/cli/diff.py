"""`hlatctl diff`: shows in which keys two runs' configurations differ."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import Json, RunName, RunsDir, columns, find_run, print_json, say, write
from hlatctl.cli.completion import run_names

#: Value of a key that a configuration doesn't have.
_MISSING = object()


def diff(
    first: RunName,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run to compare it with; none: the same run as it was created.",
            autocompletion=run_names,
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show the configuration keys in which two runs differ.

    Their configurations have all amendments. With one run, shows what its amendments have changed.
    If a run doesn't have a key, its value is shown as `-`, and as null in JSON.
    """
    from conf.load import flatten
    from conf.of_run import of_run

    run = find_run(first, runs_dir)
    if second is None:
        names, configs = ["CREATED", "NOW"], [of_run(run, number=0), of_run(run)]
    else:
        names = [run.run_id, find_run(second, runs_dir).run_id]
        configs = [of_run(run), of_run(find_run(second, runs_dir))]
    one, other = map(flatten, configs)
    keys = [key for key in {**one, **other} if one.get(key, _MISSING) != other.get(key, _MISSING)]
    if as_json:
        print_json({key: [one.get(key), other.get(key)] for key in keys})
    elif keys:
        rows = [[key, _text(one.get(key, _MISSING)), _text(other.get(key, _MISSING))] for key in keys]
        write(columns([["KEY", *names], *rows]))
    else:
        say("the configurations are equal")


def _text(value: object) -> str:
    if value is _MISSING:
        return "-"
    return "null" if value is None else str(value)
