"""`hlatctl diff`: in which keys two runs' configurations differ."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import Json, RunsDir, columns, find_run, print_json, say


def diff(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, or `latest`.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare it with.")],
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Compare two runs' configurations, key by key."""
    from conf.load import flatten, load

    runs = [find_run(name, runs_dir) for name in (first, second)]
    one, other = (flatten(load(run.config)) for run in runs)
    changed = {key: [one[key], other[key]] for key in one if one[key] != other[key]}
    if as_json:
        print_json(changed)
    elif changed:
        rows = [[key, _text(values[0]), _text(values[1])] for key, values in changed.items()]
        typer.echo(columns([["KEY", *(run.run_id for run in runs)], *rows]))
    else:
        say("the configurations are equal")


def _text(value: object) -> str:
    return "null" if value is None else str(value)
