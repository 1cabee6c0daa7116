"""`hlatctl note`: what people call a run and say of it."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import Name, RunOrSweepName, RunsDir, Tags, find_run, find_sweep, say, user_name, write
from hlatctl.report.run_view import view_run, view_sweep
from hlatctl.run import labels
from hlatctl.units import one_line, utc


def note(
    run: RunOrSweepName,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The note.", show_default=False)] = "",
    name: Name = None,
    tag: Tags = None,
    untag: Annotated[list[str] | None, typer.Option(metavar="K", help="Remove a tag.", show_default=False)] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Add a note to a run, or change its name and tags.

    A sweep has them too. Without anything to change, prints name, tags and notes. `--name ""` removes the name.
    """
    sweep = find_sweep(run, runs_dir)
    paths = sweep or find_run(run, runs_dir)
    change = labels.change(name=name, tags=tag or (), untag=untag or (), note=text)
    labels.write(paths, change, by=user_name())
    state = view_sweep(sweep)[0].labels if sweep else view_run(paths).state.labels
    if change:
        say(f"{paths.run_id}: noted")
        return
    for what, value in (("name", state.name), ("tags", labels.in_words(state.tags))):
        if value:
            write(f"{what}  {one_line(value)}")
    for each in state.notes:
        write(f"{utc(each.time_unix_s)}  {one_line(each.by)}: {one_line(each.text)}")
