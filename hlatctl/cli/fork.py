"""`hlatctl fork`: begins a run from a checkpoint of another."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hlatctl.cli.common import (
    Changes,
    ConfigDirs,
    Detach,
    Name,
    Note,
    RunName,
    RunsDir,
    Tags,
    find_run,
    say,
    user_name,
    warn_of_no_effect,
)
from hlatctl.cli.driving import drive
from hlatctl.run.labels import change, write


def fork(
    run: RunName,
    overrides: Changes = None,
    config_dir: ConfigDirs = None,
    at: Annotated[
        str, typer.Option(metavar="STEP|TOKENS|latest", help="The checkpoint, such as 5000 or 200B.")
    ] = "latest",
    restart_data: Annotated[bool, typer.Option("--restart-data", help="Read the corpus from its beginning.")] = False,
    run_id: Annotated[str | None, typer.Option(help="Id of the new run.  [default: made from name and time]")] = None,
    name: Name = None,
    tag: Tags = None,
    note: Note = "",
    detach: Detach = False,
    runs_dir: RunsDir = None,
) -> None:
    """Begin a new run from a checkpoint of another, and train it.

    It continues with the weights, the optimizer's state and the position in the data, and with the other run's
    configuration except OVERRIDES. Its steps and tokens continue those of the checkpoint. Prints the new run's id, and
    trains until the end like `hlatctl train`: Ctrl-C stops the run with a checkpoint, --detach runs it in the
    background.
    """
    from flows.fork import differences
    from flows.fork import fork as create

    labels = change(name=name, tags=tag or (), note=note)
    parent = find_run(run, runs_dir)
    new = create(parent, at, overrides or [], argv=sys.argv, run_id=run_id, restart_data=restart_data)
    write(new, labels, by=user_name())
    from conf.of_run import of_run

    config = of_run(new)
    warn_of_no_effect(config, overrides)
    origin = config.fork
    say(f"forked from {parent.run_id} at step {origin.step}, {origin.tokens:,} tokens")
    for key, (before, after) in differences(parent, new).items():
        say(f"{key}: {before} -> {after}")
    say("data: from the beginning of the corpus" if origin.restarts_data else "data: continue after the checkpoint's")
    drive(new, detach=detach)
